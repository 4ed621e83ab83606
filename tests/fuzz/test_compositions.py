"""Tests of some random compositions beside the plain loop, and of the code that draws, replays and shrinks them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.composition import GROUP, SETUP, Composition, drawn, simpler
from tests.fuzz.runner import Results, summary
from tests.fuzz.shrinking import shrunk
from tests.fuzz.trial import FOUND, PASSED, REFUSED, Outcome, tried

SEED, NUM_CASES = 1_000, 60


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, NUM_CASES, GROUP))
def test_random_compositions_train_as_the_plain_loop(first: int) -> None:
    bad = []
    for number in range(first, first + GROUP):
        composition = drawn(SEED, number)
        outcome = tried(composition)
        if outcome.kind not in (PASSED, REFUSED):
            bad.append(f"--case {SEED}:{number}: {outcome.kind}: {outcome.text}\n{composition}")
    assert not bad, "\n".join(bad)


def test_a_composition_follows_from_its_seed_and_number_and_prints_as_itself() -> None:
    for number in range(200):
        composition = drawn(3, number)
        assert composition == drawn(3, number)
        assert eval(str(composition)) == composition
        assert "\n" not in str(composition)
        assert composition.setup == drawn(3, number - number % GROUP).setup
    assert len({drawn(3, number) for number in range(200)}) > 190
    assert {drawn(seed, 0) for seed in (1, 2)} != {drawn(1, 0)}


def test_the_setup_is_what_has_to_be_compiled() -> None:
    assert {"model", "mesh", "optimizer", "data_seed"} < SETUP
    assert not {"microbatches", "schedule", "hint", "window", "evaluates"} & SETUP


def test_a_finding_shrinks_to_the_fields_that_it_needs() -> None:
    def attempt(composition: Composition) -> Outcome:
        if composition.microbatches > 4:
            return Outcome(REFUSED, "too many")
        is_found = composition.tied and composition.microbatches >= 2
        return Outcome(FOUND, f"loss is {composition.steps}") if is_found else Outcome(PASSED)

    start = replace(drawn(1, 5), tied=True, microbatches=4, stages=3, steps=4, mesh=(("fsdp", 2),))
    assert str(shrunk(start, attempt(start), attempt=attempt)) == "Composition(tied=True, microbatches=2)"


def test_simpler_compositions_differ_in_one_field() -> None:
    composition = drawn(1, 7)
    names = [name for name in vars(composition) if getattr(composition, name) != getattr(Composition(), name)]
    changed = [
        [name for name in names if getattr(each, name) != getattr(composition, name)] for each in simpler(composition)
    ]
    assert all(len(each) == 1 for each in changed)
    assert {name for each in changed for name in each} == set(names)
    assert not list(simpler(Composition()))


def test_equal_sentences_are_told_without_numbers_and_names() -> None:
    texts = ("loss of step 3 is 1.25e-3, of the plain loop 7", "loss of step 1 is 2.0, of the plain loop nan")
    assert Outcome(FOUND, texts[0]).sentence.startswith("loss of step _ is _")
    assert Outcome(REFUSED, "window 3 of 'zb-h1' (a, b)").sentence == Outcome(REFUSED, "window 12 of 'x' (c)").sentence


def test_results_are_kept_and_a_line_that_was_cut_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "seed-1.jsonl"
    common = {"composition": "Composition()", "sentence": "s", "took_s": 1.0}
    results = Results(path, 1)
    results.add(number=0, kind="passed", text="", **common)
    results.add(number=1, kind="refused", text="too small: give 3", **common)
    path.write_text(path.read_text() + '{"number": 2, "ki')
    again = Results(path, 1)
    assert sorted(again.by_number) == [0, 1]
    assert summary(list(again.by_number.values())) == 0
    assert "MORE THAN 5%: too small: give 3  (--case 1:1)" in capsys.readouterr().out
    again.add(number=3, kind="found", text="loss differs", **common)
    assert summary(list(again.by_number.values())) == 1
    assert "--case 1:3" in capsys.readouterr().out
