"""A rank of two replicas of one stage: the second one is killed, and a new process takes its place.

``returning_rank STRIKES [sleeps]``: so many further processes of that rank end before they are prepared; the one after
them fetches no state, if it is to sleep.
"""

import os
import signal
import sys
import time
from queue import SimpleQueue
from typing import Any

from rrfp_jax.cluster import HeadLink, JoinRequest, Member, RunKey, meet
from rrfp_jax.core.membership import EpochDeclared, FetchState, HoldReleased
from rrfp_jax.layout import Layout
from tests.cluster.mesh import eventually

STEP = 6


def main() -> None:
    rank, number = (int(os.environ[name]) for name in ("RRFP_RANK", "RRFP_PROCESS_NUMBER"))
    rendezvous, key, brought = os.environ["RRFP_RENDEZVOUS"], RunKey.from_environment(), dict[int, bytes]()
    member = Member(rank=rank, host="here", pid=os.getpid(), address={}, number=number)
    meet(rendezvous, JoinRequest.of(member, 2, {"seed": 1}), key, brought=brought)
    heard: SimpleQueue[Any] = SimpleQueue()
    layout = Layout(num_stages=1, data=2, num_ranks=2)
    told = {"brought": b"" if number else b"%d" % rank, "number": number}
    link = HeadLink(rendezvous, key, rank, layout, on_declared=heard.put, **told)
    if not number:
        link.take_back()
    if rank == 1 and not number:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if 0 < number <= int(sys.argv[1]):
        sys.exit(9)
    if number:
        assert brought == {0: b"0", 1: b"1"}
        link.offer(None)
        assert heard.get(timeout=30) == FetchState((), STEP)
        if "sleeps" in sys.argv:
            time.sleep(60)
        link.offer(STEP)
    else:
        assert heard.get(timeout=30)[:2] == (1, (0,))
        assert eventually(lambda: link.awaits_newcomers, 15.0)
        link.accuse((), epoch=1, holds=STEP)
    while not isinstance(told := heard.get(timeout=30), EpochDeclared | HoldReleased):
        pass
    living = told.living if isinstance(told, EpochDeclared) else (rank,)
    print(f"rank {rank} goes on with {living}, {link.members.keys()}", flush=True)
    time.sleep(1.0)
    assert link.leave(10.0)
    link.close()


if __name__ == "__main__":
    main()
