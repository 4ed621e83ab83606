"""Units that span processes: every rank gets its own shards, whatever the shardings at both ends; a peer's death."""

import time

import pytest

from tests.multiprocess.transport_member import SHARDINGS, exchange, offer_and_never_serve, started


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["sockets", pytest.param("transfer", marks=pytest.mark.slow)])
def test_units_of_several_processes_exchange_arrays_in_any_sharding(selection: str) -> None:
    with started(4, exchange, (selection,)) as ranks:
        ranks.introduce()
        if selection == "transfer":
            ranks.introduce()  # their servers
        for source in SHARDINGS:
            for target in SHARDINGS:
                assert ranks.hear_all() == ["ready"] * 4
                ranks.tell_all("go on")
                assert ranks.hear_all() == [f"{selection}: {source} to {target}"] * 4
        assert ranks.hear_all() == ["done"] * 4


def test_a_fetch_from_a_rank_that_dies_is_a_failure() -> None:
    with started(2, offer_and_never_serve) as ranks:
        ranks.introduce()
        ranks.introduce()  # their servers
        assert ranks.hear_all() == ["ready"] * 2
        ranks.tell_all("go on")
        assert ranks.hear(0) == "announced"
        time.sleep(0.3)
        assert not ranks.pipes[1].poll(0)
        ranks.members[0].kill()
        failure = ranks.hear(1, timeout_s=10.0)
        assert failure.startswith("TransportFailed: rank 1 could not fetch the activation of microbatch 0")
        assert "from rank 0" in failure
