"""Waking the loop: nothing that rings is missed, also where the system has no descriptor for it."""

import os
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from rrfp_jax.cluster.loop_thread import LoopThread
from rrfp_jax.runtime.wake_up import WakeUp

NUM_THREADS, NUM_RINGS = 4, 2000


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(params=["descriptor", "call"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "call":
        monkeypatch.delattr(os, "eventfd", raising=False)


@pytest.mark.usefixtures("_way")
def test_what_many_threads_ring_for_is_all_seen(loop: LoopThread) -> None:
    waiting, seen, is_done = deque[int](), list[int](), threading.Event()

    def look() -> None:
        while waiting:
            seen.append(waiting.popleft())
        if len(seen) == NUM_THREADS * NUM_RINGS:
            is_done.set()

    wake_up = WakeUp(loop.loop, look)
    loop.call(wake_up.listen)

    def ring(first: int) -> None:
        for number in range(first, first + NUM_RINGS):
            waiting.append(number)
            wake_up.ring()

    threads = [threading.Thread(target=ring, args=(NUM_RINGS * i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done.wait(10)
    assert sorted(seen) == [*range(NUM_THREADS * NUM_RINGS)]
    loop.call(wake_up.hush)
    wake_up.close()


@pytest.mark.usefixtures("_way")
def test_what_rang_before_the_loop_listens_is_seen(loop: LoopThread) -> None:
    is_seen = threading.Event()
    wake_up = WakeUp(loop.loop, is_seen.set)
    wake_up.ring()
    loop.call(wake_up.listen)
    assert is_seen.wait(10)
    loop.call(wake_up.hush)
    wake_up.close()


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="the system has no such descriptors")
def test_its_descriptor_is_free_again(loop: LoopThread) -> None:
    wake_up = WakeUp(loop.loop, lambda: None)
    number = wake_up._number
    assert number is not None
    loop.call(wake_up.listen)
    loop.call(wake_up.hush)
    wake_up.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
