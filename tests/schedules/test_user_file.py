"""A user's own schedules, ``FILE.py:NAME`` wherever a schedule has a name."""

import os
import re
import sys
from pathlib import Path

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules, hint_by_name
from rrfp_jax.core.snapshot import rebuild, save_arbiter
from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    ScheduleRequest,
    build_schedule,
    chain,
    linear,
    schedule_entry,
    schedule_names,
)
from rrfp_jax.simulation import Costs, constant, simulate

FILE = """
from rrfp_jax.schedules import schedule
from rrfp_jax.schedules.language import B, F, I, Stage, W, rounds, rule, turns
from rrfp_jax.schedules.request import V

def mine(s):
    return rounds(F.ahead(s.p - 1 - s.i), B)

def halves(s):
    return rounds(F.ahead(s.p - 1 - s.i), I, W.behind(s.i))

@schedule("down-and-up", shape=V, source="a test")
def both_ways(s):
    down, back = s.chunks
    return (F[down] + F[back] + B[back] + B[down]).until(F[down])

@schedule("1f1b", source="the name of another one")
def taken(s):
    return F.rest + B.rest

def _helper():
    return 1

in_turn = rule(turns(B, F), W, key="microbatch")
"""
REQUEST = ScheduleRequest(num_stages=3, num_microbatches=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "my_schedules.py"
    file.write_text(FILE)
    return file


def test_a_function_of_a_stage_is_a_schedule_on_whole_or_split_backwards(path: Path) -> None:
    assert build_schedule(f"{path}:mine", REQUEST).rows == build_schedule("1f1b", REQUEST).rows
    table = build_schedule(f"{path}:halves", REQUEST)
    assert table.name == f"{path}:halves"
    assert table.rows == build_schedule("zb-h1", REQUEST).rows


def test_a_function_heeds_chunks_and_any_graph(path: Path) -> None:
    request = ScheduleRequest(num_stages=2, num_microbatches=4, chunks_per_stage=2)
    name = f"{path}:taken"
    assert build_schedule(name, request).rows == build_schedule("breadth-first", request).rows
    graph = PipelineGraph(3, 2, (Edge(0, 2), Edge(1, 2)))
    request = ScheduleRequest(num_stages=3, num_microbatches=2, graph=graph)
    assert [len(row) for row in build_schedule(name, request).rows] == [4, 4, 4]


def test_what_a_file_registers_is_known_by_its_name_there_and_nowhere_else(path: Path) -> None:
    before = schedule_names()
    for name in ("down-and-up", "both_ways"):
        entry = schedule_entry(f"{path}:{name}")
        assert (entry.source, entry.shape.chunks_per_stage, entry.any_graph) == ("a test", 2, False)
        table = build_schedule(f"{path}:{name}", REQUEST)
        assert [str(task) for task in table.orders[0][:5]] == ["0F0", "5F0", "5B0", "0B0", "0F1"]
    assert schedule_names() == before
    assert build_schedule(f"{path}:1f1b", REQUEST).rows == build_schedule("gpipe", REQUEST).rows


def test_a_file_that_has_changed_is_read_anew(path: Path) -> None:
    build_schedule(f"{path}:mine", REQUEST)
    path.write_text(FILE.replace("F.ahead(s.p - 1 - s.i), B)", "F.ahead(s.p - s.i), B)"))
    os.utime(path, ns=(1, 1))
    assert str(build_schedule(f"{path}:mine", REQUEST).orders[2][1]) == "2F1"


def test_a_file_imports_the_modules_beside_it_and_no_others_of_their_name(tmp_path: Path) -> None:
    text = "from warm_up import ahead\nfrom rrfp_jax.schedules.language import B, F, rounds\n"
    text += "def mine(s):\n    return rounds(F.ahead(ahead(s)), B)\n"
    for folder, ahead in (("one", "s.p - 1 - s.i"), ("two", "s.p - s.i")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_schedules.py").write_text(text)
        (tmp_path / folder / "warm_up.py").write_text(f"def ahead(s):\n    return {ahead}\n")
    path = list(sys.path)
    tables = [build_schedule(f"{tmp_path / folder}/my_schedules.py:mine", REQUEST) for folder in ("one", "two")]
    assert [str(table.orders[2][1]) for table in tables] == ["2B0", "2F1"]
    assert sys.path == path
    assert "warm_up" not in sys.modules
    (tmp_path / "two" / "my_schedules.py").write_text("import no_such_module\n")
    os.utime(tmp_path / "two" / "my_schedules.py", ns=(1, 1))
    with pytest.raises(ValueError, match=r"ModuleNotFoundError in line 1 of my_schedules\.py: No module named"):
        build_schedule(f"{tmp_path}/two/my_schedules.py:mine", REQUEST)


def test_a_rule_is_a_hint_and_no_schedule(path: Path) -> None:
    hint = hint_by_name(f"{path}:in_turn")
    assert hint.name == f"{path}:in_turn"
    assert hint.choose(0, (3, 5, None, None)) == (5, 1)
    assert hint.choose(1, (3, 5, None, None)) == (3, 0)
    graph = chain(2, 6)
    order = Ordering(hint=f"{path}:in_turn", window=2).resolve(linear(2), graph)
    known = Ordering(hint="bf", window=2).resolve(linear(2), graph)
    rules = StepRules(updates=False, agreement=Agreement.NONE)
    costs = Costs(durations_ms=constant((10, 10, 10), graph))
    ran, expected = (simulate(one.arbiters(rules), costs).timeline.order() for one in (order, known))
    assert ran == expected
    saved = save_arbiter(order.arbiters(rules)[0])
    with pytest.raises(ValueError, match="a record's word runs no file: name the file yourself, with --rules FILE"):
        rebuild(saved, graph, linear(2))
    assert rebuild(saved, graph, linear(2), rules_file=str(path)).consumption.hint.name == hint.name
    with pytest.raises(ValueError, match="is a rule: give it as a hint, or describe a table with its"):
        build_schedule(f"{path}:in_turn", REQUEST)
    with pytest.raises(ValueError, match="is a schedule, not a rule"):
        Ordering(hint=f"{path}:mine")
    with pytest.raises(ValueError, match="did you mean in_turn"):
        Ordering(hint=f"{path}:in_turns")


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, "mine", "cannot read schedule {path}:mine: No such file or directory: give the path of a Python file"),
        (FILE, "mind", "{path} has no schedule 'mind': did you mean mine? write {path}:NAME; it describes down-and-up"),
        (FILE, "_helper", "{path} has no schedule '_helper'"),
        (FILE, "", "{path} has no schedule '': write {path}:NAME; it describes down-and-up, 1f1b, mine, halves"),
        ("x = 1\n", "x", "{path} has no schedule 'x': write {path}:NAME; it has no function of a stage"),
        ("\nx = y\n", "x", "cannot import {path}: NameError in line 2 of my_schedules.py: name 'y' is not defined"),
        ("def f(s):\n  return (\n", "f", "cannot import {path}: '(' was never closed in line 2"),
        ("import sys\nsys.exit(3)\n", "f", "cannot import {path}: SystemExit in line 2 of my_schedules.py: 3"),
        (
            "from rrfp_jax.schedules import schedule\n@schedule('a')\ndef f(s): ...\n@schedule('a')\ndef g(s): ...\n",
            "a",
            "schedule 'a' is registered twice: give one of them another name",
        ),
        ("def f(s):\n  return None\n", "f", "schedule '{path}:f', stage 0 gives None: return an order"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_sentence(path: Path, text: str | None, name: str, words: str) -> None:
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words.format(path=path))) as caught:
        build_schedule(f"{path}:{name}", REQUEST)
    assert "\n" not in str(caught.value)
