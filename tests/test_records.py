"""Records as plain data and back: what comes back is what was given, and nothing else passes."""

import json
from typing import Any

import numpy as np
import pytest

from rrfp_jax.core import (
    DecideNow,
    Event,
    InputArrived,
    Instruction,
    Message,
    MessageKind,
    RunPair,
    RunTask,
    TaskFinished,
)
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.schedules import Op, Pair, Placement, Task, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Placement, Placement((0, 1, 0))),
        (Event, TaskFinished(3, 0.5, Task(TaskKind.F, 1, 2))),
        (Event, DecideNow(3, 0.5, Task(TaskKind.B, 1, 2))),
        (Instruction, RunTask(3, Task.parse("0F0"))),
        (Instruction, RunPair(3, Pair(Task.parse("0F0"), Task.parse("0B1")))),
        (Task | Pair, Pair(Task.parse("0F0"), Task.parse("0B1"))),
        (Task | Pair, Task.parse("0F0")),
        (Event, InputArrived(3, 0.5, Message(MessageKind.GRADIENT, 2, 1, 7))),
        (Timeline, Timeline(2, [Span(0, 1, Task(TaskKind.U, 1), 0.25, 1e-3)])),
        (dict[IdleReason, float], {IdleReason.FILL: 0.5, IdleReason.INPUT: 0.25}),
        (tuple[str | None, ...], ("a", None)),
        (tuple[TaskKind, int], (TaskKind.F, 1)),
        (Op, Op("L", after=Op("O", after="F"), before="B", holds=0.5, pairs=frozenset({(0, 1)}))),
        (frozenset[int], frozenset({2, 1})),
        (tuple[int, ...], (1 << 63, 1 << 200, -(1 << 70))),
    ],
)
def test_what_is_written_is_read_again(kind: Any, value: Any) -> None:
    read = from_plain(kind, json.loads(json.dumps(to_plain(value))))
    assert read == value
    assert type(read) is type(value)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    assert to_plain((np.int64(3), np.float32(0.5), frozenset({(np.int32(1), 0)}))) == [3, 0.5, [[1, 0]]]
    assert type(to_plain(np.int64(3))) is int
    with pytest.raises(TypeError, match="no record"):
        to_plain(object())


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (int, True, "expected"),
        (int, 1.5, "int"),
        (int, "0xg", "invalid literal"),
        (float, "1", "float"),
        (Task, "F0", "not a task"),
        (Task, 3, "a task"),
        (TaskKind, "f", "capital letters"),
        (Placement, {"stage_of_chunk": [0, 2]}, "leaves stages"),
        (Placement, {"stage_of_chunk": [0], "more": 1}, "an object with stage_of_chunk"),
        (MessageKind, "letter", "one of activation"),
        (Message, ["Message", "activation", 0, 1], "a list of 5"),
        (Message, ["Task", "activation", 0, 1, 2], "where Message is expected"),
        (tuple[int, int], [1, 2, 3], "a list of 2"),
        (tuple[int, ...], [1, "2"], "an item of it"),
        (int | None, "2", "int"),
        (list[int], 1, "a list"),
        (dict[str, int], [["a", 1, 2]], "a list of 2"),
        (dict[str, int], [[1, 1]], "str"),
    ],
)
def test_values_of_another_type_are_refused_with_their_place(kind: Any, data: Any, message: str) -> None:
    with pytest.raises(MalformedRecord, match=message):
        from_plain(kind, data)
