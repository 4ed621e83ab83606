"""Flags of XLA: whose win, and that none is handed on which would end the process."""

import subprocess
import sys
from importlib import import_module

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.runtime.jax_environment import LIBTPU, XLA, check_flags, flags_agreed, settings_agreed, use_xla_flags
from tests.commands.running import ROOT
from tests.environment import of_child

KNOWN = "--xla_gpu_enable_latency_hiding_scheduler=true"


def test_what_the_user_says_goes_first() -> None:
    environ = {XLA: "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=x"}
    assert use_xla_flags([KNOWN, "--xla_gpu_enable_pipelined_all_gather=true"], environ)
    assert environ[XLA].split() == [
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_latency_hiding_scheduler=false",
        "--xla_dump_to=x",
    ]
    assert not use_xla_flags([KNOWN], environ)


def test_flags_of_tpus_go_to_their_compiler() -> None:
    environ: dict[str, str] = {}
    assert use_xla_flags(["--xla_tpu_enable_async_collective_fusion=true"], environ)
    assert environ == {LIBTPU: "--xla_tpu_enable_async_collective_fusion=true"}


def test_processes_compare_what_decides_programs() -> None:
    environ = {XLA: f"--xla_force_host_platform_device_count=8 {KNOWN}", LIBTPU: "--xla_tpu_a=1"}
    assert flags_agreed(environ) == {
        "XLA's flag --xla_gpu_enable_latency_hiding_scheduler (of XLA_FLAGS or run.xla_flags)": "true",
        "XLA's flag --xla_tpu_a (of LIBTPU_INIT_ARGS or run.xla_flags)": "1",
    }


def test_a_flag_that_xla_does_not_know_is_refused() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(ValueError, match=r"--xla_gpu_no_such_flag=1, which libjax_common.so .* does not know"):
        use_xla_flags([KNOWN, "--xla_gpu_no_such_flag=1"], environ)
    assert not environ


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["xla_dump_to=x"], "write each as"), ([KNOWN, KNOWN], "twice: leave one out")],
)
def test_what_is_no_flag_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_flags(flags)


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted((ROOT / "tpu_gpu_configs/gpu").glob("*.yaml")), ids=lambda path: path.stem)
def test_xla_starts_with_the_flags_of_a_preset(preset: object) -> None:
    flags = load_train_config(str(preset), {}).run.xla_flags
    code = "import jax; jax.jit(lambda x: x + 1)(1.0)"
    environ = {**of_child(), "JAX_PLATFORMS": "cpu", XLA: " ".join(flags)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_that_decide_numbers_are_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("jax")
    told = {name.split()[2] for name in settings_agreed({})}
    decide = {"threefry_partitionable", "default_prng_impl", "default_matmul_precision", "enable_x64"}
    decide |= {"numpy_dtype_promotion", "random_seed_offset", "disable_jit", "share_binary_between_hosts"}
    assert {f"jax_{name}" for name in decide} <= told
    may_differ = {"compilation_cache_dir", "logging_level", "log_compiles", "cuda_visible_devices", "dump_ir_to"}
    may_differ |= {"platforms", "num_cpu_devices", "cross_host_transfer_socket_address", "debug_nans"}
    assert not {f"jax_{name}" for name in may_differ} & told
    monkeypatch.delitem(sys.modules, "jax")
    environ = {"JAX_ENABLE_X64": "1", "JAX_COMPILATION_CACHE_DIR": "/x", "JAX_PROCESS_ID": "3", "HOME": "/"}
    assert settings_agreed(environ) == {"JAX's setting jax_enable_x64 (JAX_ENABLE_X64)": "1"}
