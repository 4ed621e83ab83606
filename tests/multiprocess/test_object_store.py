"""Runs in a bucket of a real server of S3's protocol: one at a time, refused without rights, read by all commands."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import optax
import pytest

from rrfp_jax.checkpoint import NotDone, last_committed
from rrfp_jax.storage import _store
from tests.checkpoint.states import bits, newest_step, opened, pieces_of, restored, save, trained
from tests.commands.running import run_afresh
from tests.environment import of_child
from tests.multiprocess.launching import eventually, launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, training_config

pytestmark = pytest.mark.slow

TAKE = """
import sys, time
from rrfp_jax.storage import located
from rrfp_jax.training._run_lock import LockHeld, lock_of
lock = lock_of(located(sys.argv[1]))
list(located(sys.argv[1]).glob("*"))
print("ready", flush=True)
sys.stdin.readline()
try:
    lock.take()
    lock.check()
except LockHeld:
    print("-", flush=True)
else:
    print("+", flush=True)
sys.stdin.readline()
lock.release()
"""


def test_of_many_takers_at_once_one_succeeds(bucket: Path) -> None:
    for attempt in range(4):
        command = [sys.executable, "-c", TAKE, str(bucket / str(attempt % 2))]  # free, or given back
        takers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=of_child())
            for _ in range(5)
        ]
        for word in ("ready", None):
            said = [taker.stdout.readline().strip() for taker in takers]  # type: ignore[union-attr]
            assert word is None or said == [word] * 5
            for taker in takers:
                taker.stdin.write("go\n")  # type: ignore[union-attr]
                taker.stdin.flush()  # type: ignore[union-attr]
        assert sorted(said) == ["+", "-", "-", "-", "-"]
        for taker in takers:
            taker.communicate(timeout=60)


class BadLine:
    """A way to a server of this machine, on which connections are cut: before a request is through, or its answer."""

    def __init__(self, port: int, chance: random.Random, cut: float) -> None:
        self._port, self._chance, self._cut, self.num_cut = port, chance, cut, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._chance.random() < self._cut:
                    self.num_cut += 1
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_lost_connections_lose_no_commit(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pieces = pieces_of([["layers.0"], ["head"]], optax.sgd(1e-3))
    line = BadLine(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), random.Random(1), 0.06)
    failures, known = 0, None
    for step in range(1, 11):
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
            _store.cache_clear()
            try:
                checkpoints = opened(bucket, pieces)
                failure = save(checkpoints, step, pieces)
            except NotDone as error:  # nothing could be swept
                failure = str(error)
        _store.cache_clear()
        failures += failure is not None
        found = opened(bucket, pieces)
        newest = newest_step(found)
        # A step whose last answer was lost may be there; one that was saved is.
        assert newest in ((known, step) if failure else (step,)), failure
        known = newest
        if known is not None:
            assert bits(restored(found, pieces)) == bits(trained(pieces, known))
        found.close()
    print(f"{line.num_cut} connections were cut, and {failures} of 10 saves failed")
    line.close()
    assert line.num_cut > 10


def test_two_runs_on_one_prefix_and_what_commands_read_there(bucket: Path, tmp_path: Path) -> None:
    run = bucket / "run"
    options = ("--config", training_config(tmp_path, num_stages=1, checkpoint_every=2), "--run-dir", run)
    evaluated = ("--held-out", 0.2, "--evaluation.batches", 1)
    with launched(
        "--processes", 1, "--", "experiments.train", *options, *evaluated, "--steps", 100_000, **QUICK_TO_COMPILE
    ) as first:
        assert eventually(lambda: (last_committed(run / "checkpoints") or 0) >= 4, 120), first.text
        second = run_afresh("train", *options, *evaluated, "--fresh")
        assert second.returncode == 2
        (told,) = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
        assert told.startswith(f"error: {run} is in use: process ")
        assert told.endswith("wait for it to end, stop it, or name another run directory")
        first.process.terminate()
        assert first.wait(120) == 7, first.text
    step = last_committed(run / "checkpoints")
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert step is not None
    assert [row for row in rows if row >= 0] == list(range(step))
    on_tokens = ("--data.kind", "tokens", "--data.path", bucket / "tokens", "--run.init-from", bucket / "imported")
    for command in (
        ("evaluate", run, "--json"),
        ("sample", run, "--prompt", "a", "--max-tokens", 3),
        ("convert", "export", run, bucket / "exported"),
        ("convert", "import", bucket / "exported", bucket / "imported"),
        ("tokenize", Path(__file__), "--tokenizer", "bytes", "--out", bucket / "tokens"),
        ("train", *options[:2], "--steps", 2, "--run-dir", bucket / "tuned", *on_tokens),
    ):
        result = run_afresh(*command)
        assert result.returncode == 0, (command, result.stderr)
    assert last_committed(bucket / "tuned" / "checkpoints") == 2
    refused = run_afresh("train", *options[:2], "--run-dir", "s3://no-such-bucket/run")
    assert refused.returncode == 2
    assert "run_dir s3://no-such-bucket/run cannot be used (The specified bucket does not exist)" in refused.stderr
