"""A run goes on where what decides the result is the same, however it is cut and batched."""

from typing import Any

import pytest

from rrfp_jax.commands.training.assembly import check_same_training
from rrfp_jax.commands.training.config import load_train_config


def saved(**overrides: Any) -> dict[str, Any]:
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_train_config("cpu/multimodal", given).as_dict()


def test_another_layout_is_the_same_training() -> None:
    other = saved(
        data__num_microbatches=8, data__images={"text_buckets": 1, "balance": True}, optimizer__shard=False,
        pipeline__num_stages=2,
    )  # fmt: skip
    assert check_same_training(saved(), other, force=False) == []


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"data__images": {"mean": 0.1}}, "data.mean"),
        ({"vision__overrides": {"norm_eps": 1e-7}}, "vision.norm_eps"),
        ({"projector__overrides": {"bias": False}}, "projector.bias"),
        ({"optimizer__clip_norm": 2.0}, "optimizer.clip_norm"),
        ({"run__seed": 3}, "run.seed"),
    ],
)
def test_another_training_is_refused_unless_it_is_meant(overrides: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"saved by another training: {name} was "):
        check_same_training(saved(), saved(**overrides), force=False)
    assert len(check_same_training(saved(), saved(**overrides), force=True)) == 1
