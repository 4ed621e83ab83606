"""What all ranks recorded, on rank 0's clock: also days after the start, when hosts' clocks have drifted apart."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.runtime.cluster import Cluster
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import Span, Timeline
from tests.cluster.mesh import networks

NUM_RANKS = 3
LENGTH_S = 0.01


class Host:
    """A rank whose clock can be set."""

    def __init__(self, network: Any) -> None:
        cluster = Mock(spec=Cluster, comes_back=False, num_ranks=NUM_RANKS, rank=network.rank, network=network)
        self.process = Process(Layout(num_stages=NUM_RANKS, num_ranks=NUM_RANKS), cluster)
        assert self.process.peers is not None
        self.clocks = self.process.peers.clocks
        self.set(0.0)

    def set(self, later_s: float) -> None:
        """The clock shows so much more than this machine's."""
        self._later_s = later_s
        self.clocks._clock = lambda: time.perf_counter() + later_s

    def recorded(self, start_s: float) -> Timeline:
        """What this rank's stage ran, from a moment on this machine's clock on, as its own clock had it."""
        began_s = start_s + self._later_s
        rank = self.process.rank
        return Timeline(NUM_RANKS, [Span(0, rank, Task.parse(f"{rank}F0"), began_s, began_s + LENGTH_S)])


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with networks(NUM_RANKS) as made:
        yield [Host(network) for network in made]


def test_what_ran_one_after_the_other_is_shown_so_however_clocks_drift(hosts: list[Host]) -> None:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for later_s in ((0.0, 40.0, -25.0), (0.0, 43.5, -27.0)):  # at the start, and a day later
            for host, own_s in zip(hosts, later_s, strict=True):
                host.set(own_s)
            start_s = time.perf_counter()
            own = [host.recorded(start_s + rank) for rank, host in enumerate(hosts)]
            whole, *others = pool.map(lambda host, record: host.process.whole_timeline(record), hosts, own)
            assert others == own[1:]
            starts_s = {span.stage: span.start_s - start_s for span in whole.spans}
            assert starts_s == pytest.approx({0: 0.0, 1: 1.0, 2: 2.0}, abs=0.05)
