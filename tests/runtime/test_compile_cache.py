"""Compiled programs are loaded by later starts, on any rank and device; counted by what JAX says itself."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rrfp_jax.private.jax_names import compilation_cache, compiler
from rrfp_jax.runtime import compile_cache
from rrfp_jax.runtime.compile_cache import CompileCache, cache_path, use_compile_cache
from tests.environment import of_child

START = """
import json, sys
import jax

from rrfp_jax.runtime.compile_cache import use_compile_cache
from rrfp_jax.runtime.start_jax import use_virtual_devices
from tests.runtime.test_compile_cache import Counts, compile_for

use_virtual_devices(3)
devices = jax.devices()
from rrfp_jax.private.jax_names import global_state
global_state.process_id = int(sys.argv[1])
counts, cache = Counts(), use_compile_cache()
results = [compile_for(device) for device in json.loads(sys.argv[2])]
print(json.dumps({"compiled": counts.num_compiled, "loaded": counts.num_loaded, "results": results,
                  "told": cache.describe()}))
"""


class Counts:
    """What JAX itself says of its compilations."""

    def __init__(self) -> None:
        self._requests = self.num_loaded = 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_: Any) -> None:
        self._requests += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.num_loaded += event == "/jax/compilation_cache/cache_hits"

    @property
    def num_compiled(self) -> int:
        return self._requests - self.num_loaded


def compile_for(device: int) -> list[Any]:
    """Compile a program, always the same, and run it; its result and what its memory analysis says."""
    at = SingleDeviceSharding(jax.devices()[device])
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    program = jax.jit(lambda x: x @ x.T + 1, in_shardings=at, out_shardings=at).lower(x).compile()
    result = program(x)
    assert result.devices() == {jax.devices()[device]}
    return [np.asarray(result).tolist(), program.memory_analysis().argument_size_in_bytes]


def start(home: Path, *, rank: int, devices: tuple[int, ...]) -> Any:
    """What another process, which calls itself ``rank``, makes of it."""
    told = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", START, str(rank), json.dumps(devices)],
        env={
            **of_child(compile_cache.VARIABLE),
            "XDG_CACHE_HOME": str(home),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return json.loads(told.stdout)


def test_what_one_start_compiles_the_next_loads_on_every_rank_and_device(tmp_path: Path) -> None:
    first = start(tmp_path, rank=1, devices=(0,))
    assert (first["compiled"], first["loaded"]) == (1, 0)
    again = start(tmp_path, rank=2, devices=(2, 0))
    assert (again["compiled"], again["loaded"]) == (0, 2)
    assert again["results"] == first["results"] * 2
    path = tmp_path / "rrfp" / "programs"
    assert again["told"] == f"2 programs in all: 2 loaded from {path}, 0 compiled"
    assert len(list(path.iterdir())) == 1


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., CompileCache | None]]:
    """Use a cache within this process, as another start would; afterwards all is as it was."""
    for module, name in (
        (compilation_cache, "get_file_cache"),
        (compilation_cache, "get_cache_key"),
        (compiler, "_cache_write"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compile_cache.VARIABLE)
    options = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches",
    )
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    yield use_compile_cache
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def counted(cache: CompileCache | None) -> tuple[int, int]:
    """How many were loaded and compiled when a program was asked for, once."""
    assert cache is not None
    compile_for(0)
    return cache.num_hits, cache.num_misses


def test_a_program_for_another_host_is_compiled(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(use()) == (0, 1)
    monkeypatch.setattr(compile_cache, "host_digest", lambda num_threads: "another CPU")
    assert counted(use()) == (0, 1)


def test_threads_of_another_number_are_another_host(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(use()) == (0, 1)
    monkeypatch.setenv("NPROC", "77")
    assert counted(use()) == (0, 1)


def test_a_damaged_entry_is_compiled_again(use: Any, tmp_path: Path) -> None:
    assert counted(use()) == (0, 1)
    (entry,) = (tmp_path / "rrfp" / "programs").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    assert counted(use()) == (0, 1)
    assert counted(use()) == (1, 0)


def test_a_program_for_a_device_that_is_not_here_is_not_cached() -> None:
    """Nothing could load it, and JAX would warn of that at every later start."""
    absent, options = np.array([SimpleNamespace(process_index=0)]), SimpleNamespace(device_assignment=None)
    assert compile_cache._key(None, absent, options, SimpleNamespace(platform="gpu")) == compile_cache._NEVER


def test_a_program_over_several_cpu_devices_is_compiled_anew(use: Any) -> None:
    """XLA loses the order of its collectives when it loads it: the devices could wait for each other for ever."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    for _ in range(2):
        cache = use()
        jax.jit(lambda x: x.sum(), in_shardings=cut).lower(np.arange(8.0)).compile()
        assert (cache.num_hits, cache.num_misses) == (0, 1)


def test_it_can_be_switched_off(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use("none") is None
    monkeypatch.setenv(compile_cache.VARIABLE, "none")
    assert use("auto") is None
    assert use(str(tmp_path / "here")) is None
    compile_for(0)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_told_and_stops_nobody(use: Any, tmp_path: Path) -> None:
    (tmp_path / "rrfp").write_text("in the way")
    cache = use()
    assert counted(cache) == (0, 1)
    assert "1 compiled; they cannot be kept: " in cache.describe()


def test_where_it_lies() -> None:
    assert cache_path("auto", None, {"HOME": "/home/me"}) == Path("/home/me/.cache/rrfp/programs")
    assert cache_path("auto", None, {"HOME": "/home/me", "XDG_CACHE_HOME": "/fast"}) == Path("/fast/rrfp/programs")
    assert cache_path("auto", "/of/jax", {"HOME": "/home/me"}) == Path("/of/jax")
    assert cache_path("auto", "gs://bucket/of/jax", {"HOME": "/home/me"}) is None
    assert cache_path("auto", None, {}) is None
    assert cache_path("none", "/of/jax", {"HOME": "/home/me"}) is None
    assert cache_path("/here", "/of/jax", {}) == Path("/here")
    for wrong in ("here", "gs://bucket"):
        with pytest.raises(ValueError, match=f"compile_cache is '{wrong}': give auto, none, or the absolute path"):
            cache_path(wrong, None, {})
