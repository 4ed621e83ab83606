"""Hosts that are lost, each a launcher with ranks of its own: the run goes on, or starts again on those left."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.cluster import RunKey
from tests.multiprocess.launching import Launched, eventually, launched
from tests.multiprocess.ports import free_port
from tests.multiprocess.runs import QUICK_TO_COMPILE, Outcome, outcome_of, training_config
from tests.multiprocess.striking import num_rows, rows_of

STEPS = 200
CHANGES: dict[str, Any] = {"num_stages": 2, "replicas": 2, "steps": STEPS, "checkpoint_every": 10}
CHANGES |= {"hidden": 64, "mlp_dim": 128, "length": 64, "batch_size": 64, "learning_rate": 1e-4}
"""A run that lasts longer than hosts must stay before the others count on them."""


class Hosts:
    """Two hosts with a launcher and two ranks each, which train in ``folder``."""

    def __init__(self, folder: Path, *arguments: object, **changes: Any) -> None:
        self.run, self._key = folder / "run", RunKey.generate()
        config = training_config(folder, **CHANGES | changes)
        self._head = ("--head", f"127.0.0.1:{free_port()}", "--processes", 2, "--grace-s", 15, *arguments)
        self._command = ("--", "experiments.train", "--config", config, "--run-dir", self.run)

    @contextmanager
    def launcher(self, node: int) -> Iterator[Launched]:
        place = ("--node-rank", node, "--interface", f"127.0.0.{node + 1}")
        variables = {**QUICK_TO_COMPILE, **self._key.environment()}
        with launched(*self._head, *place, *self._command, **variables) as started:
            yield started

    def await_rows(self, number: int) -> None:
        assert eventually(lambda: num_rows(self.run) >= number, 120)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("unharmed")
    config = training_config(folder, **CHANGES)
    with launched("--processes", 1, "--", "experiments.train", "--config", config, "--run-dir", folder / "run") as one:
        assert one.wait(300) == 0, one.text
    return outcome_of(folder / "run", STEPS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_starts_again_on_the_hosts_that_are_left_and_grows_when_others_return(
    unharmed: Outcome, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path, "--nodes", "2,1", "--max-restarts", 3)
    with hosts.launcher(0) as first:
        with hosts.launcher(1) as second:
            hosts.await_rows(12)
            second.signal(signal.SIGKILL)
            second.wait()
        assert eventually(lambda: "2 of 4 ranks: 1 replicas" in first.text, 120), first.text
        assert "the run has 1 of 2 nodes" in first.text
        with hosts.launcher(1) as returned:
            assert eventually(lambda: "nodes have come back" in first.text, 120), first.text
            assert (first.wait(300), returned.wait(60)) == (0, 0), first.text + returned.text
            assert "the run has 1 of 2 nodes; this one waits for the next restart" in returned.text
            assert "rank 3" not in first.text.split("nodes have come back")[0].split("restart 1 of")[1]
    outcome_of(hosts.run, STEPS).assert_close(unharmed)
    last = rows_of(hosts.run)[-1]
    assert (last["lost_units"], last["goodput"] < 0.95) == ([], True)
    assert f"goodput {100 * last['goodput']:.0f}"[:-1] in first.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_that_takes_one_replica_with_it_stops_nobody_and_comes_back(unharmed: Outcome, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "--nodes", 2, "--max-restarts", 4, reduce="messages")
    with hosts.launcher(0) as first:
        with hosts.launcher(1) as second:
            hosts.await_rows(12)
            second.signal(signal.SIGKILL)
            second.wait()
        assert eventually(lambda: rows_of(hosts.run)[-1]["lost_units"] == [2, 3], 120), first.text
        with hosts.launcher(1) as returned:
            assert (first.wait(300), returned.wait(60)) == (0, 0), first.text + returned.text
            assert "rank 2 is back" in first.text
            assert "rank 3 is back" in first.text
    outcome_of(hosts.run, STEPS).assert_close(unharmed)
    assert rows_of(hosts.run)[-1]["lost_units"] == []
