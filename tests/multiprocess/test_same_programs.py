"""Processes that share a stage and would wait in different collectives are told so before the first step."""

import re

import pytest

from tests.multiprocess.launching import launched

PATIENCE_S = 180.0


def told(difference: str) -> list[str]:
    """What each rank says."""
    with launched("--processes", 2, "--", "differing", difference) as launcher:
        assert launcher.wait(PATIENCE_S) == 0, launcher.text
        found = re.findall(r"(?:refused|trained): .*", launcher.text)
    assert len(found) == 2, launcher.text
    return found


def test_another_partition_on_one_rank_is_refused_by_name() -> None:
    for sentence in told("partition"):
        assert sentence.startswith(
            "refused: rank 1 and rank 0 share stage 0, replica 0, and would wait for each other for ever: "
            "embedding, layer 0, head, parameter ['layers.0']['mlp']['up']['kernel'] is P() on rank 1 and "
            "P(None, 'tensor') on rank 0"
        ), sentence


@pytest.mark.slow
def test_another_computation_is_refused_by_its_program() -> None:
    for sentence in told("computation"):
        assert re.search(r"embedding, layer 0, head, forward is all-reduce .* on rank 1 and all-reduce", sentence), (
            sentence
        )


@pytest.mark.slow
def test_equal_programs_train() -> None:
    (sentence,) = set(told("nothing"))
    assert sentence.startswith("trained: ")
