"""The optimizer's record: defaults by name, and what does not belong together is refused in one sentence."""

import re
from typing import Any

import pytest

from rrfp_jax.commands.training.assembly import check_same_training
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.training.run_config import OPTIMIZERS, OptimizerConfig, ParameterGroup

DEBUG = "cpu/debug"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_name_has_its_own_defaults_and_the_resolved_record_is_read_as_the_same(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1)
    assert config.arguments == OPTIMIZERS[name]
    resolved = load_train_config(
        DEBUG, {f"optimizer.{key}": value for key, value in vars(config).items() if value is not None}
    )
    assert resolved.optimizer.arguments == config.arguments


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "adam"}, "name is 'adam': give one of adamw, lion, sgd, muon, adafactor"),
        ({"schedule": "wsd"}, "schedule is 'wsd': give one of constant, cosine, linear, warmup-stable-decay"),
        (
            {"name": "sgd", "arguments": {"b1": 0.9}},
            "arguments has 'b1', which sgd does not take: it takes momentum, nesterov, weight_decay",
        ),
        ({"arguments": {"momentum": 0.9}}, "arguments has 'momentum', which adamw does not take"),
        ({"arguments": {"b1": "high"}}, "b1 is 'high': give a number"),
        ({"name": "sgd", "arguments": {"nesterov": 1}}, "nesterov is 1: give true or false"),
        (
            {"name": "muon", "arguments": {"newton_schulz_steps": 1.5}},
            "newton_schulz_steps is 1.5: give a whole number",
        ),
        ({"schedule": "constant", "final_learning_rate": 0.0}, "final_learning_rate is no field of the schedule const"),
        (
            {"schedule": "constant", "decay_steps": 3},
            "decay_steps is no field of the schedule constant, which has none",
        ),
        ({"decay_steps": 0}, "decay_steps is 0: give at least 1"),
        (
            {"name": "adafactor", "arguments": {"clipping_threshold": 0.5}},
            "clipping_threshold is 0.5: give at least 1, or 0",
        ),
        (
            {"name": "sgd", "arguments": {"nesterov": True}},
            "nesterov looks ahead along the momentum, which is 0: give momentum",
        ),
        (
            {"arguments": {"nesterov": True, "b1": 0}},
            "nesterov looks ahead along the momentum, which is 0: give b1, or",
        ),
        ({"name": "muon", "arguments": {"momentum": 1.0}}, "momentum is 1.0: give at least 0 and less than 1"),
        ({"arguments": {"spike_deviations": 0}}, "spike_deviations is 0: give a positive number"),
        ({"arguments": {"spike_window": 16}}, "spike_window is the number of norms that tell a spike: give spike_dev"),
        ({"arguments": {"average_decay": 1}}, "average_decay is 1: give a number between 0 and 1, or leave it out"),
    ],
)
def test_what_does_not_belong_together_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        OptimizerConfig(learning_rate=0.1, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"match": ()}, "matches nothing"),
        (
            {"match": ("layers.*",)},
            "the group layers.* changes nothing: give it a learning_rate_scale or a weight_decay",
        ),
        ({"match": ("layers.*",), "learning_rate_scale": -1.0}, "learning_rate_scale is -1.0: give 0 or more"),
        ({"match": ("layers.*",), "weight_decay": float("nan")}, "weight_decay is nan: give 0 or more"),
    ],
)
def test_groups_that_say_nothing_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ParameterGroup(**fields)


def test_groups_are_read_from_a_file_or_an_option() -> None:
    groups = [{"match": ["layers.*.attention.*"], "learning_rate_scale": 0.1, "weight_decay": 0}]
    config = load_train_config(DEBUG, {"optimizer.groups": groups})
    assert config.optimizer.groups == (
        ParameterGroup(match=("layers.*.attention.*",), learning_rate_scale=0.1, weight_decay=0.0),
    )
    assert config.as_dict()["optimizer"]["groups"] == groups
    with pytest.raises(ValueError, match=r"--optimizer.groups .*optimizer.groups has no key 'decay'"):
        load_train_config(DEBUG, {"optimizer.groups": [{"match": ["layers"], "decay": 0.0}]})


def test_another_optimizer_is_another_training() -> None:
    given = load_train_config(DEBUG, {}).as_dict()
    assert check_same_training(given, {**given, "optimizer": {**given["optimizer"], "shard": True}}, force=False) == []
    for changed in ({"name": "lion"}, {"schedule": "linear"}, {"groups": [{"match": ["head"], "weight_decay": 0.0}]}):
        with pytest.raises(ValueError, match=f"optimizer.{next(iter(changed))} was"):
            check_same_training(given, {**given, "optimizer": {**given["optimizer"], **changed}}, force=False)


def test_an_average_is_one_more_number_in_float32_and_without_it_there_is_no_argument() -> None:
    plain = OptimizerConfig(learning_rate=0.1, arguments={"average_decay": None})
    assert plain.arguments == OptimizerConfig(learning_rate=0.1).arguments
    averaging = OptimizerConfig(learning_rate=0.1, arguments={"average_decay": 0.9})
    assert averaging.arguments == {**plain.arguments, "average_decay": 0.9}
    assert (averaging.num_moments(), averaging.num_moments(param_bytes=2), plain.num_moments()) == (3, 4, 2)
