"""What is told of a plan: tables and plain data."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CostEntry
from rrfp_jax.planner.records import Plan, Ranked
from rrfp_jax.planner.report import milliseconds, order_in_words, plan_as_json, show_plan
from rrfp_jax.readable import format_bytes
from tests.planner.plans import MIB, TYPES, choice_of, made_plan, ranked_of, table_of

BOOK = CostBook(layers=made_plan().ranking[0].choice.cut.costs.layers, entries=(CostEntry(types=TYPES),), source="made")


def shown(plan: Plan, *, top: int = 5, memory_bytes: int | None = 600 * MIB) -> str:
    output = io.StringIO()
    show_plan(Console(file=output, width=120, highlight=False), plan, BOOK, top=top, memory_bytes=memory_bytes)
    return output.getvalue()


def row(text: str, start: str) -> list[str]:
    """The cells of the first row that begins so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in re.split("  +", line.strip())]


def test_the_report_tells_ranking_cuts_and_why() -> None:
    text = shown(made_plan())
    assert row(text, "1   4 x 1 x 1")[2:4] == ["8 of 1", "searched strict"]
    assert "Et*3|t*3|t*3|tL" in text
    assert "19.5% slower: stage 3 has more work" in text
    assert "not decided" not in text
    assert "why it won" not in text
    told = replace(
        plan := made_plan(), why=("one", "two"), alternatives=(replace(plan.ranking[1], why="another cut: 1%"),)
    )
    assert "why it won: one; two" in shown(told)
    assert re.search(r"  another cut, 4 x 1 x 1, 8 of 1, [^:]*, Et[^:]*: 1%", shown(told))
    assert plan_as_json(told, BOOK, top=1)["alternatives"][0]["why"] == "another cut: 1%"
    assert "2 x 1 x 1, 8 of 1, remat none: stage 0 needs 2 GiB: window 2" in text
    assert "1f1b with foresight" not in shown(made_plan(), top=1).partition("what cut and order give")[0]


def test_even_best_and_found_stand_side_by_side_with_bound_and_memory() -> None:
    text, even = shown(made_plan()), made_plan().ranking[-1]
    peak = format_bytes(even.choice.peak_bytes)
    assert row(text, "even cut, best named")[1:5] == ["240.5", "233.3", peak, "+19.5%"]
    assert row(text, "found")[-1] == "Et*3|t*3|t*3|tL"
    assert "none fits" in shown(made_plan(even=None))


def test_memory_is_told_by_stage_and_part_and_adds_up() -> None:
    peak = made_plan().ranking[0].choice.memory[3].peak
    assert row(shown(made_plan()), "3       tL")[-2:] == [format_bytes(peak), f"{1 - peak / (600 * MIB):.1%}"]
    data = plan_as_json(made_plan(), BOOK, top=5)["ranking"][0]
    assert all(s["peak"] == s["fixed"] + s["in_flight"] + s["temporaries"] for s in data["memory"])
    assert data["peak_bytes"] == max(stage["peak"] for stage in data["memory"])
    assert "free" not in shown(made_plan(), memory_bytes=None)


def test_what_is_open_is_said() -> None:
    plan = made_plan(is_decided=False, num_draws=64)
    noisy = replace(plan, ranking=tuple(_noisy(ranked) for ranked in plan.ranking))
    text = shown(noisy)
    assert "not decided: 1 and 2 are 12.75 ms apart" in text
    assert "201.2 ± 0.3 " in text
    assert "211.3" in text, "p95"
    assert "211.3" not in shown(made_plan())


def test_equal_stages_share_a_row() -> None:
    ordering = Ordering(schedule=table_of("gpipe", 4, 8))
    assert row(shown(made_plan(ranking=(ranked_of(choice_of(3, 3, 3, 3, ordering=ordering), 9.0),))), "1-2")[1] == "t*3"


def test_a_tie_without_noise_needs_no_draws() -> None:
    assert "not decided: 1 and 2 are 12.75 ms apart without noise: take either" in shown(made_plan(is_decided=False))


def _noisy(ranked: Ranked) -> Ranked:
    return replace(ranked, forecast=replace(ranked.forecast, error_ms=0.3))


def test_plain_data_name_the_whole_choice() -> None:
    data = json.loads(json.dumps(plan_as_json(made_plan(), BOOK, top=2), allow_nan=False))
    assert len(data["ranking"]) == 2
    best = data["ranking"][0]
    assert (best["layout"], best["layers_of_chunk"], best["stage_of_chunk"]) == (
        "Et*3|t*3|t*3|tL",
        [4, 3, 3, 2],
        [0, 1, 2, 3],
    )
    assert (best["consume"], best["is_searched"], best["devices"], best["batch_size"]) == ("strict", True, 4, 8)
    assert data["even_cut_best_named"]["layout"] == "Et*2|t*3|t*3|t*2L"
    assert data["costs"]["letters"] == {"embedding": "E", "layer": "t", "head": "L"}
    assert data["refused"][0]["change"] == "window 2"


@pytest.mark.parametrize(
    ("ordering", "words"),
    [
        (Ordering(schedule=table_of("1f1b", 4, 8), consume="strict"), "1f1b strict"),
        (Ordering(schedule=table_of("1f1b", 4, 8)), "1f1b with foresight"),
        (Ordering(schedule=table_of("1f1b", 4, 8), foresight=False, window=6), "1f1b ready, window 6"),
        (Ordering(schedule=table_of("1f1b", 4, 8), footprint=False), "1f1b with foresight, no footprint"),
        (Ordering(hint="bf", window=(4, 4, 4, 4)), "bf, window 4"),
        (Ordering(hint="bf", window=(4, 3, 2, 1)), "bf, window 4,3,2,1"),
    ],
)
def test_orders_in_words(ordering: Ordering, words: str) -> None:
    name = "1f1b" if ordering.schedule else "bf"
    assert order_in_words(choice_of(3, 3, 3, 3, ordering=ordering, order_name=name)) == words


def test_milliseconds_keep_four_digits() -> None:
    assert [milliseconds(value) for value in (1229.14, 12.345, 0.5)] == ["1,229.1", "12.35", "0.500"]
