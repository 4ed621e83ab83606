"""Runs in a bucket of a real server of S3's protocol: one at a time, refused without rights, read by all commands."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import optax
import pytest

from rrfp_jax.checkpoint import NotDone, last_committed
from rrfp_jax.storage import BucketPath, _store, check_bucket
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


@contextmanager
def only_with_rights() -> Iterator[None]:
    """Lets the server look at credentials, which it does not otherwise."""
    server = os.environ["AWS_ENDPOINT_URL"]

    def look_after(requests: bytes) -> None:
        urlopen(Request(f"{server}/moto-api/reset-auth", requests, {"Content-Type": "text/plain"})).close()

    look_after(b"0")
    try:
        yield
    finally:
        look_after(b"inf")


def credentials(user: str, *rights: str) -> dict[str, str]:
    """Makes a user with these rights, and returns the environment of its processes."""
    client = pytest.importorskip("boto3").client("iam")
    client.create_user(UserName=user)
    for right in rights:
        rule = {"Effect": "Allow", "Action": f"s3:{right}*", "Resource": "*"}
        policy = {"Version": "2012-10-17", "Statement": [rule]}
        client.put_user_policy(UserName=user, PolicyName=right, PolicyDocument=json.dumps(policy))
    key = client.create_access_key(UserName=user)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


READ, ALL = ("Get", "Head", "List"), ("Get", "Head", "List", "Put", "Delete")


def test_a_bucket_without_rights_is_refused_before_work_starts(
    bucket: BucketPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = training_config(tmp_path, num_stages=1)
    users = {"nobody": (), "reader": READ, "owner": ALL}
    users |= {f"all-but-{right}": {*ALL} - {right} for right in ("List", "Put", "Delete")}
    keys = {user: credentials(f"{bucket.name}-{user}", *rights) for user, rights in users.items()}
    keys["stranger"] = {"AWS_ACCESS_KEY_ID": "unknown", "AWS_SECRET_ACCESS_KEY": "unknown"}
    assert run_afresh("train", "--config", config, "--steps", 2, "--run-dir", bucket / "run").returncode == 0
    before = bucket.files()
    (tmp_path / "text").write_text("to be tokenized")
    remedy = ": check the name of the bucket, and that your credentials let you list, read, write and delete there"

    def refused(command: tuple[object, ...], begin: str, end: str = remedy) -> None:
        result = run_afresh(*map(str, command))
        (told,) = result.stderr.splitlines()
        assert (result.returncode, told[: len(begin)], told[-len(end) :]) == (2, begin, end)

    with only_with_rights():
        for user, environment in keys.items():
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                _store.cache_clear()
                if user == "owner":
                    check_bucket(bucket, "run_dir")
                else:
                    words = f"^run_dir {bucket} cannot be used .*(Denied|Forbidden).*{remedy}$"
                    with pytest.raises(ValueError, match=words):
                        check_bucket(bucket, "run_dir")
                if user in ("nobody", "reader"):
                    for name in ("run", "new"):
                        train = "train", "--config", config, "--steps", 4, "--run-dir", bucket / name
                        refused(train, f"error: run_dir {bucket / name} cannot be used (")
                    tokenize = "tokenize", tmp_path / "text", "--tokenizer", "bytes", "--out", bucket / "tokens"
                    refused(tokenize, f"error: out {bucket / 'tokens'} cannot be used (")
                sample = "sample", bucket / "run", "--prompt", "a", "--max-tokens", 3
                if user == "nobody":
                    begin = f"error: {bucket / 'run' / 'model.yaml'}: the object store refused or failed ("
                    refused(sample, begin, ": mend the network or your credentials, and try again")
                elif user == "reader":
                    assert run_afresh(*sample).returncode == 0
    _store.cache_clear()
    after = bucket.files()
    # Who may write and not delete leaves the few bytes of its trial.
    assert {name: size for name, size in after.items() if not name.endswith(".tmp")} == before
    assert len(after) == len(before) + 1
    assert run_afresh("train", "--config", config, "--steps", 3, "--run-dir", bucket / "run").returncode == 0
