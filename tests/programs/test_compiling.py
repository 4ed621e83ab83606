"""Processes that share a GPU compile in turn; CPU devices stand in for the card."""

import ctypes
import fcntl
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from rrfp_jax.programs import compiling
from rrfp_jax.programs.compiling import lock_file, timing_alone
from tests.environment import of_child

COMPILE = """
import json, sys, time
import jax, numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered

from rrfp_jax.programs import compiling
from rrfp_jax.programs.compiling import compile_program

card, times, compile_it = sys.argv[1], [], Lowered.compile
compiling.times_kernels, compiling.card_of = (lambda device: True), (lambda device: card)


def watched(lowered):
    begin_s = time.monotonic()
    compiled = compile_it(lowered)
    time.sleep(0.05)  # long enough for the other process to begin
    times.append((begin_s, time.monotonic()))
    return compiled


Lowered.compile = watched
at = SingleDeviceSharding(jax.devices()[0])
print("ready", flush=True)
input()
for number in range(4):
    spec = jax.ShapeDtypeStruct((number + 1,), np.float32)
    compile_program("double", lambda x: x * 2, spec, in_shardings=at, out_shardings=at)
print(json.dumps(times))
"""

HOLD = """
import sys, time
import jax

from rrfp_jax.programs import compiling

compiling.times_kernels, compiling.card_of = (lambda device: True), (lambda device: sys.argv[1])
with compiling.timing_alone(jax.devices()[:1]):
    print("held", flush=True)
    time.sleep(600)
"""


def start(script: str, *args: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script, *args], env=of_child(), stdin=pipe, stdout=pipe, text=True)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a card on which this process and those that it starts time kernels."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(compiling, "times_kernels", lambda device: True)
    monkeypatch.setattr(compiling, "card_of", lambda device: "GPU-1")
    return "GPU-1"


def test_two_processes_compile_in_turn_for_one_card(card: str) -> None:
    both = [start(COMPILE, card) for _ in range(2)]
    for child in both:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    told = []
    for child in both:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in both:
        out, _ = child.communicate(timeout=60)
        told += json.loads(out)
    told.sort()
    assert len(told) == 8
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(told))


def test_a_process_that_dies_holds_nobody_up(card: str) -> None:
    with start(HOLD, card) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with lock_file(card).open("a") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.kill()
    with timing_alone(jax.devices()[:1]):
        pass


def test_neither_another_card_nor_a_missing_folder_is_waited_for(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with timing_alone(jax.devices()[:1]):
        monkeypatch.setattr(compiling, "card_of", lambda device: "GPU-2")
        with timing_alone(jax.devices()[:2]):
            assert lock_file("GPU-2").exists()
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with timing_alone(jax.devices()[:1]):
        assert not lock_file("GPU-2").exists()


def test_a_card_is_known_by_its_uuid_and_by_none_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """CUDA's, which numbers the cards that the process sees."""

        def cuInit(self, flags: int) -> int:
            return flags

        def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
            handle._obj.value = ordinal
            return int(ordinal > 3)

        def cuDeviceGetUuid_v2(self, found: Any, handle: Any) -> int:
            found[:] = bytes([handle.value]) * 16
            return 0

    def no_driver(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    card_of = compiling.card_of.__wrapped__
    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert card_of(SimpleNamespace(local_hardware_id=2)) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert card_of(SimpleNamespace(local_hardware_id=2)) == "02020202-0202-0202-0202-020202020202"
    assert card_of(SimpleNamespace(local_hardware_id=4)) is None
