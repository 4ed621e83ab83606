"""The optimizer of a run, from its record: every parameter array by itself, groups of them in their own way.

An update is a direction, which the optimizer's name decides, then decoupled weight decay, the learning rate, and the
scale of the parameter's group. Groups go by the paths of parameters in the model. Each chunk is updated by itself, by
the names that its layers have there, so it finds the groups of its own ones; chunks whose updates come out the same
share their program.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from rrfp_jax.programs.freezing import matches
from rrfp_jax.training.muon import scale_by_muon
from rrfp_jax.training.optimizer_config import (
    ADAFACTOR,
    ADAMW,
    LION,
    MUON,
    OPTIMIZERS,
    SGD,
    OptimizerConfig,
    ParameterGroup,
)

Settings = Mapping[str, Any]


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """What updates the parameters; the global norm is clipped by the pipeline, not here.

    Of parameters as a dictionary from layer name to nested dictionaries. Call :func:`check_groups` first.
    """
    return optax.chain(
        _DIRECTIONS[config.name](config.settings),
        _add_decay(config),
        optax.scale_by_learning_rate(schedule),
        _scale_groups(config),
    )


def check_groups(config: OptimizerConfig, params: Any) -> None:
    """Raise ValueError for a group that no parameter is in, and for a pattern that matches none.

    ``params`` are all parameters that train, or their shapes.
    """
    paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    example = next((path for path in paths if path.count(".") > 1), paths[0])
    taken = {id(group) for path in paths if (group := _group_of(config, path)) is not None}
    for number, group in enumerate(config.groups):
        if id(group) in taken:
            continue
        name = f"optimizer.groups[{number}] ({', '.join(group.match)})"
        if any(_is_in(group, path) for path in paths):
            raise ValueError(f"all that {name} matches is in groups before it: move it up, or leave it out")
        raise ValueError(f"{name} matches no parameter that is trained: paths are such as {example}")
    patterns = [(f"groups[{number}].match", p) for number, group in enumerate(config.groups) for p in group.match]
    # the default patterns are for all models, so they need not match
    own = set(config.adam_parameters or ()) - set(OPTIMIZERS[MUON]["adam_parameters"])
    for field, pattern in [*patterns, *(("adam_parameters", p) for p in sorted(own))]:
        if not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"optimizer.{field} has {pattern!r}, which matches no parameter that is trained: paths are such as "
                f"{example}"
            )


def path_of(path: tuple[Any, ...]) -> str:
    """The path of a parameter, for example ``layers.3.mlp.up.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _adam(settings: Settings) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=settings["b1"], b2=settings["b2"], eps=settings["eps"])


def _lion(settings: Settings) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=settings["b1"], b2=settings["b2"])


def _sgd(settings: Settings) -> optax.GradientTransformation:
    if not settings["momentum"]:
        return optax.identity()
    return optax.trace(decay=settings["momentum"], nesterov=settings["nesterov"])


def _adafactor(settings: Settings) -> optax.GradientTransformation:
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=settings["decay_rate"],
            min_dim_size_to_factor=settings["min_dim_size_to_factor"],
            epsilon=settings["eps"],
        )
    ]
    if settings["clipping_threshold"]:
        parts.append(optax.clip_by_block_rms(settings["clipping_threshold"]))
    if settings["multiply_by_parameter_scale"]:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(*parts)


def _muon(settings: Settings) -> optax.GradientTransformation:
    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, leaf: "muon" if is_muon(path_of(path), leaf) else "adam", params)

    def is_muon(path: str, leaf: Any) -> bool:
        return leaf.ndim > 1 and not any(matches(pattern, path) for pattern in settings["adam_parameters"])

    adam = optax.scale_by_adam(b1=settings["b1"], b2=settings["b2"], eps=settings["eps"])
    muon = scale_by_muon(
        beta=settings["momentum"],
        nesterov=settings["nesterov"],
        num_steps=settings["newton_schulz_steps"],
        consistent_rms=settings["consistent_rms"],
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


_DIRECTIONS: Mapping[str, Callable[[Settings], optax.GradientTransformation]] = {
    ADAMW: _adam,
    LION: _lion,
    SGD: _sgd,
    MUON: _muon,
    ADAFACTOR: _adafactor,
}


def _add_decay(config: OptimizerConfig) -> optax.GradientTransformation:
    """Of matrices, and of stacks of them."""

    def decayed(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        group = _group_of(config, path_of(path))
        own = None if group is None else group.weight_decay
        decay = config.weight_decay if own is None else own
        return update + decay * param if decay and param.ndim > 1 else update

    return optax.stateless(lambda updates, params: jax.tree.map_with_path(decayed, updates, params))


def _scale_groups(config: OptimizerConfig) -> optax.GradientTransformation:
    def scaled(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        group = _group_of(config, path_of(path))
        return update if group is None or group.learning_rate_scale == 1 else update * group.learning_rate_scale

    return optax.stateless(lambda updates, params: jax.tree.map_with_path(scaled, updates))


def _group_of(config: OptimizerConfig, path: str) -> ParameterGroup | None:
    """The first group that a parameter is in."""
    return next((group for group in config.groups if _is_in(group, path)), None)


def _is_in(group: ParameterGroup, path: str) -> bool:
    return any(matches(pattern, path) for pattern in group.match)
