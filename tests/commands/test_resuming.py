"""A checkpoint of an earlier version tells less, and is gone on from all the same."""

from dataclasses import asdict
from typing import Any

import pytest

from rrfp_jax.commands.training.resuming import check_same_training
from rrfp_jax.models import ProjectorConfig, RopeScaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
EARLIER = {"model": {"rope_scaling": LLAMA3}, "projector": {"activation": "gelu"}}


def now(scaling: RopeScaling, **projector: Any) -> dict[str, Any]:
    given = asdict(ProjectorConfig(**projector))
    return {"model": {"rope_scaling": asdict(scaling)}, "projector": {n: given[n] for n in ("activation", "bias")}}


def test_what_there_was_no_choice_about_is_the_same() -> None:
    assert check_same_training(EARLIER, now(RopeScaling(factor=8)), force=False) == []


def test_what_is_chosen_otherwise_now_is_another_training() -> None:
    with pytest.raises(ValueError, match=r"projector.bias was True and is False"):
        check_same_training(EARLIER, now(RopeScaling(factor=8), bias=False), force=False)
    with pytest.raises(ValueError, match=r"model.rope_scaling was .*llama3.* and is .*'linear'"):
        check_same_training(EARLIER, now(RopeScaling(kind="linear", factor=8)), force=False)
