"""Processes that share a stage, and would wait in different collectives or start from different states, are told so
before the first step."""

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


@pytest.mark.slow
def test_another_partition_on_one_rank_is_refused_by_name() -> None:
    for sentence in told("partition"):
        assert sentence.startswith(
            "refused: rank 1 and rank 0 share stage 0, replica 0, and would wait for each other for ever: "
            "embedding, layer 0, head, parameter ['layers.0']['mlp']['up']['kernel'] is P() on rank 1 and "
            "P(None, 'tensor') on rank 0"
        ), sentence


@pytest.mark.slow
def test_other_parameters_on_one_rank_are_refused_by_name() -> None:
    for sentence in told("parameters"):
        assert re.match(
            r"refused: stage 0: layer 'final_norm', parameter \['scale'\] differs between chunk 0", sentence
        )
        assert re.search(
            r"on rank 0 \(checksum \w{8}\) and chunk 0 on rank 1 \(\w{8}\), as 2 more arrays do;", sentence
        )


@pytest.mark.slow
def test_another_number_of_steps_on_one_rank_is_refused() -> None:
    for sentence in told("steps"):
        assert sentence.startswith("refused: rank 1 goes on after 7 steps and rank 0 after 0: all copies"), sentence


@pytest.mark.slow
def test_another_computation_is_refused_before_it_is_compiled() -> None:
    """Compilers of GPUs would wait for each other for hours."""
    for sentence in told("computation"):
        assert re.search(
            r"would wait for each other for ever: embedding, layer 0, head, forward and backward, line \d+ of its "
            r"text, is .* on rank 1 and .* on rank 0; give",
            sentence,
        ), sentence


@pytest.mark.slow
def test_another_optimizer_is_refused_by_the_line_that_differs() -> None:
    for sentence in told("optimizer"):
        assert re.search(
            r"update embedding, .*, line \d+ of its text, is .*-2\.0+e-01.* on rank 1 and .*-1\.0+e-01.* on rank 0",
            sentence,
        ), sentence


@pytest.mark.slow
def test_other_collectives_after_compiling_are_refused_by_their_program() -> None:
    for sentence in told("compiled"):
        assert re.search(r"embedding, layer 0, head, forward is all-reduce .* on rank 1 and all-reduce", sentence), (
            sentence
        )


@pytest.mark.slow
def test_equal_programs_train() -> None:
    (sentence,) = set(told("nothing"))
    assert sentence.startswith("trained: ")
