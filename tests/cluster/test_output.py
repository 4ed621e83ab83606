"""Lines of several processes on two streams."""

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from rrfp_jax.cluster.child_processes import Output
from rrfp_jax.cluster.config import LaunchSettings


class Terminal(io.BytesIO):
    """Says that somebody looks at it."""

    def isatty(self) -> bool:
        return True


def copied(prefix: str, stdout: BinaryIO | None = None) -> tuple[bytes, bytes]:
    """What two ranks' output becomes."""
    out, err = stdout or io.BytesIO(), io.BytesIO()
    output = Output(out, err, prefix=prefix)
    for rank in range(2):
        output.follow(f"rank {rank}", io.BytesIO(b"a\nb"), io.BytesIO(b"e\n"), is_main=rank == 0)
        output.drain(5.0)
    output.say("done")
    return out.getvalue(), err.getvalue()  # type: ignore[attr-defined]


def test_always():
    out, err = copied("always")
    assert out == b"[rank 0] a\n[rank 0] b\n[rank 1] a\n[rank 1] b\n"
    assert err == b"[rank 0] e\n[rank 1] e\n[launcher] done\n"


def test_auto_is_always_on_a_terminal_and_else_leaves_standard_output_to_rank_0():
    assert copied("auto", Terminal()) == copied("always")
    out, err = copied("auto")
    assert out == b"a\nb"  # to the byte
    assert sorted(err.splitlines()) == sorted(
        [b"[rank 0] e", b"[rank 1] a", b"[rank 1] b", b"[rank 1] e", b"[launcher] done"]
    )


def test_a_long_line_comes_out_whole():
    out = io.BytesIO()
    output = Output(out, io.BytesIO(), prefix="always")
    line = b"x" * (5 << 20) + b"\n"
    output.follow("rank 0", io.BytesIO(line), io.BytesIO(), is_main=True)
    output.drain(5.0)
    assert out.getvalue() == b"[rank 0] " + line


def test_lines_go_nowhere_once_a_terminal_has_hung_up():
    controller, terminal = os.openpty()
    os.close(controller)
    with open(terminal, "wb") as hung_up:
        assert_all_is_read(hung_up)
        assert os.path.samestat(os.fstat(hung_up.fileno()), Path(os.devnull).stat())


def test_what_cannot_be_written_is_lost_and_no_rank_has_to_wait():
    with open("/dev/full", "wb", buffering=0) as full:
        assert_all_is_read(full)


def assert_all_is_read(target: BinaryIO) -> None:
    output = Output(target, target, prefix="always")
    output.say("begins")
    reader, writer = os.pipe()
    with open(writer, "wb") as rank:
        output.follow("rank 0", open(reader, "rb"), io.BytesIO(), is_main=True)  # noqa: SIM115 - the output closes it
        rank.write(b"x\n" * 100_000)
    output.drain(5.0)
    output.say("ends")


def test_an_unknown_choice():
    with pytest.raises(ValueError, match="prefix is 'sometimes': give auto, always, never"):
        LaunchSettings(command=("m",), num_processes=1, prefix="sometimes")


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (b"warning: slow\nterminate called\n  what():  accept: Too many open files\n    @ 0x7f Error()\n", "Too many"),
        (b"F1126 x.cc:1] /job/task:1 tried to connect with a different incarnation\n*** SIGABRT ***\n", "incarnation"),
        (b"rank 1 hosts stage 1\nFatal Python error: Aborted\n", None),
        (b"", None),
    ],
)
def test_the_last_line_in_which_a_process_told_of_an_error_is_known(errors: bytes, said: str | None):
    output = Output(io.BytesIO(), io.BytesIO(), prefix="always")
    output.follow("rank 1", io.BytesIO(b"an error in what it prints\n"), io.BytesIO(errors), is_main=False)
    output.drain(5.0)
    told = output.last_error("rank 1")
    assert told is None if said is None else said in (told or "")
    assert output.last_error("rank 2") is None
