"""Every kind and reason has a look of its own, also for colour-blind readers, and numbers stand out."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from rrfp_jax.observe.style import (
    IDLE_LOOKS,
    OPERATION_COLOURS,
    TASK_LOOKS,
    relative_luminance,
    rgb,
    shade,
    task_looks,
    text_colour,
)
from rrfp_jax.schedules import BUILT_IN_KINDS, TaskKind
from rrfp_jax.schedules.timeline import IdleReason

# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
VISIONS = {
    "typical": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def seen(colour: str, vision: str) -> NDArray[np.float64]:
    """CIE L*a*b* of a colour under a kind of colour vision."""
    channels = np.array(rgb(colour)) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    linear = np.clip(VISIONS[vision] @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(first: str, second: str, vision: str) -> float:
    return float(np.linalg.norm(seen(first, vision) - seen(second, vision)))


def test_every_kind_and_reason_has_a_look() -> None:
    assert set(TASK_LOOKS) == set(BUILT_IN_KINDS)
    assert set(IDLE_LOOKS) == set(IdleReason)
    assert len({look.label for look in (*TASK_LOOKS.values(), *IDLE_LOOKS.values())}) == len(BUILT_IN_KINDS) + len(
        IdleReason
    )
    assert len({look.pattern for look in IDLE_LOOKS.values()}) == len(IdleReason)


@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_stay_apart_for_every_colour_vision(vision: str) -> None:
    for first, second in combinations(BUILT_IN_KINDS, 2):
        assert distance(TASK_LOOKS[first].colour, TASK_LOOKS[second].colour, vision) > 15, (first, second)


@pytest.mark.parametrize("vision", VISIONS)
def test_operations_stay_apart_from_all_else_for_every_colour_vision(vision: str) -> None:
    known = [*(look.colour for look in TASK_LOOKS.values()), *(look.fill for look in IDLE_LOOKS.values())]
    for number, colour in enumerate(OPERATION_COLOURS):
        for other in (*known, *OPERATION_COLOURS[:number]):
            assert distance(colour, other, vision) > 20, (colour, other)


def test_operations_have_colours_one_after_the_other_and_say_where_they_run() -> None:
    looks = task_looks({TaskKind("L"): "h2d", TaskKind("O"): "d2h", TaskKind("F"): "compute", TaskKind("S"): "compute"})
    assert [*looks] == [*BUILT_IN_KINDS, "L", "O", "S"]
    assert [looks[TaskKind(kind)].colour for kind in "LOS"] == list(OPERATION_COLOURS[:3])
    labels = ["L: operation on h2d", "O: operation on d2h", "S: operation"]
    assert [looks[TaskKind(kind)].label for kind in "LOS"] == labels


@pytest.mark.parametrize("vision", VISIONS)
def test_work_and_idle_time_stay_apart_for_every_colour_vision(vision: str) -> None:
    for kind in BUILT_IN_KINDS:
        for reason in IdleReason:
            assert distance(TASK_LOOKS[kind].colour, IDLE_LOOKS[reason].fill, vision) > 15, (kind, reason)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_later_chunks_are_lighter_and_numbers_readable(count: int) -> None:
    for base in (*(look.colour for look in TASK_LOOKS.values()), *OPERATION_COLOURS):
        shades = [shade(base, rank, count) for rank in range(count)]
        luminances = [relative_luminance(colour) for colour in shades]
        assert shades[0] == base
        assert luminances == sorted(set(luminances))
        for colour, luminance in zip(shades, luminances, strict=True):
            dark, light = sorted([luminance, relative_luminance(text_colour(colour))])
            assert (light + 0.05) / (dark + 0.05) >= 4.3
