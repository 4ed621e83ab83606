"""A rank of two replicas of one stage: the second one stops, and the first one goes on without it."""

import os
import signal
import sys
import time
from queue import SimpleQueue
from typing import Any

from rrfp_jax.cluster import HeadLink, JoinRequest, Member, RunKey, meet
from rrfp_jax.core.membership import RunCompleted
from rrfp_jax.layout import Layout


def main() -> None:
    rank, rendezvous, key = int(os.environ["RRFP_RANK"]), os.environ["RRFP_RENDEZVOUS"], RunKey.from_environment()
    request = JoinRequest.of(Member(rank=rank, host="here", pid=os.getpid(), address={}), 2, {})
    meet(rendezvous, request, key)
    heard: SimpleQueue[Any] = SimpleQueue()
    link = HeadLink(rendezvous, key, rank, Layout(num_stages=1, data=2, num_ranks=2), on_declared=heard.put)
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        sys.exit(1)
    time.sleep(0.5)
    link.accuse(((1, "silent for 0.5 s"),))
    declared = heard.get(timeout=30)
    print(f"goes on with {declared.living}", flush=True)
    time.sleep(2.0)
    if not link.leave(10.0) or heard.get(timeout=10) != RunCompleted():
        sys.exit(1)
    link.close()


if __name__ == "__main__":
    main()
