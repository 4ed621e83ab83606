"""A rank without JAX: prints, comes to the rendezvous if told, and ends as its arguments say."""

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

RANK, ATTEMPT = int(os.environ["RRFP_RANK"]), int(os.environ["RRFP_ATTEMPT"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", nargs=3, type=float, metavar=("RANK", "CODE", "AFTER_S"), action="append", default=[])
    parser.add_argument("--failing-attempts", type=int, default=1000)
    parser.add_argument("--run-s", type=float, default=0.0)
    parser.add_argument("--term-code", type=int, help="end with this code on SIGTERM")
    parser.add_argument("--stubborn", type=int, metavar="RANK", help="take no notice of SIGINT and SIGTERM")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--meet", action="store_true", help="come to the rendezvous, and wait for all others there")
    parser.add_argument("--needs-service", action="store_true", help="say there that JAX's service is needed")
    parser.add_argument("--absent", type=int, metavar="RANK", help="never come there")
    parser.add_argument("--late", nargs=2, type=float, metavar=("RANK", "S"), default=(-1, 0), help="before all else")
    parser.add_argument("--chatter", type=int, default=0, metavar="LINES")
    parser.add_argument("--show", action="append", default=[], metavar="VARIABLE")
    parser.add_argument("--show-cores", action="store_true")
    arguments = parser.parse_args()
    if arguments.late[0] == RANK:
        time.sleep(arguments.late[1])
    signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
    if arguments.term_code is not None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(arguments.term_code))
    if arguments.stubborn == RANK:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.grandchild:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    print(f"hello from {RANK}")
    print(f"an error line of {RANK}", file=sys.stderr)
    shown = {name: os.environ.get(name) for name in arguments.show}
    if arguments.show_cores:
        shown |= {"cores": sorted(os.sched_getaffinity(0)), "is_batch": os.sched_getscheduler(0) == os.SCHED_BATCH}
        shown |= {"descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    print(json.dumps({"rank": RANK, "attempt": ATTEMPT, **shown}), flush=True)
    if arguments.meet and arguments.absent != RANK and not _meet(needs_service=arguments.needs_service):
        return 6
    for number in range(arguments.chatter):
        print("chatter", number, flush=True)
        time.sleep(0.02)
    return _work(arguments)


def _meet(*, needs_service: bool) -> bool:
    """Whether all have come to the rendezvous."""
    from rrfp_jax.cluster import JoinRequest, Member, RendezvousFailed, RunKey, meet

    member = Member(rank=RANK, host=socket.gethostname(), pid=os.getpid(), address={})
    try:
        hello = JoinRequest.of(member, int(os.environ["RRFP_NUM_RANKS"]), {}, needs_service=needs_service)
        meet(os.environ["RRFP_RENDEZVOUS"], hello, RunKey.from_environment(), deadline_s=60.0)
    except RendezvousFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    print(f"met {os.getpid()}", flush=True)
    return True


def _work(arguments: argparse.Namespace) -> int:
    started_s = time.monotonic()
    for rank, code, after_s in arguments.fail:
        if rank == RANK and arguments.failing_attempts > ATTEMPT:
            time.sleep(after_s)
            return int(code)
    while time.monotonic() < started_s + arguments.run_s:
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main())
