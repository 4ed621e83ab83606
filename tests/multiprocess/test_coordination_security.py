"""Who does not have the run key gets nothing from JAX's coordination service, and disturbs nobody."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rrfp_jax.cluster.coordination_service import SECURED, service_security
from rrfp_jax.cluster.keys import RunKey
from tests.environment import of_child
from tests.multiprocess.launching import PROGRAMS, ROOT, eventually, launched

pytestmark = pytest.mark.skipif(
    service_security() != SECURED, reason="this JAX has no mutual TLS for its coordination service: 0.11.2 and newer do"
)
OTHER_KEY = RunKey.generate().text()


def stranger(address: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "stranger.py"), address, *arguments],
        env={**of_child(), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tried(address: str, ways: Sequence[tuple[str, str]]) -> list[tuple[int, list[str], str]]:
    """What strangers that come at the same time could do: exit codes, what each said, and what JAX said."""
    with ExitStack() as stack:
        processes = [stack.enter_context(stranger(address, *way)) for way in ways]
        told = [process.communicate(timeout=60) for process in processes]
        return [(p.returncode, out.splitlines(), err) for p, (out, err) in zip(processes, told, strict=True)]


def keys_in_memory(pid: int) -> int:
    """How many keys of certificates a process has open, as files in its memory."""
    held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sum(name.startswith("/memfd:rrfp-key") for name in held)


def test_who_has_another_key_or_none_reads_nothing_and_releases_nobody(tmp_path: Path):
    signs, temporary = tmp_path / "signs", tmp_path / "temporary"
    signs.mkdir()
    temporary.mkdir()
    with launched("--processes", 2, "--", "guarded", "--signs", signs, TMPDIR=str(temporary)) as launcher:
        assert eventually(lambda: "guarded at" in launcher.text), launcher.text
        address = next(line.split()[-1] for line in launcher.lines if "guarded at" in line)
        assert_no_place_is_taken(address)
        (signs / "join").touch()
        assert eventually(lambda: "0 at the gate" in launcher.text), launcher.text
        for code, said, log in tried(address, [("1", "ask"), ("1", f"ask-with-{OTHER_KEY}")]):
            assert code == 0, log
            assert [line.startswith("refused: ") for line in said] == [True, True], said
            assert "failed to connect" in said[0]
        assert_no_place_is_taken(address)
        assert "is through" not in launcher.text
        assert sum(keys_in_memory(pid) for pid in launcher.living()) == 3, "the service's and two ranks'"
        assert list(temporary.iterdir()) == []
        (signs / "pass").touch()
        assert launcher.wait() == 0
        assert {"0 is through", "[rank 1] 1 is through"} <= set(launcher.lines)


def assert_no_place_is_taken(address: str) -> None:
    """Neither while rank 0 waits for rank 1, nor after it has come."""
    for code, said, log in tried(address, [("1", "join"), ("1", f"join-with-{OTHER_KEY}")]):
        assert (code, said) == (-signal.SIGABRT, []), log
        assert "RegisterTask" in log


def test_without_protection_the_same_stranger_reads_and_releases():
    """So it would notice if it could."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with stranger(address, "serve") as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        for code, said, log in tried(address, [("0", "join-and-tell"), ("1", "join")]):
            assert code == 0, log
            assert said == ["joined", "got known to holders of the key", "got None"], "both are through the barrier"
        service.communicate("")
