"""The optimizer of a run and its learning rates, from their record: every parameter array by itself.

An update is a direction, which the optimizer's name decides, then decoupled weight decay, the learning rate, and the
scale of the parameter's group. Groups go by the paths of parameters in the model. Each chunk is updated by itself, by
the names that its layers have there, so it finds the groups of its own ones; chunks whose updates come out the same
share their program.

With the peak ``P``, the final rate ``E``, ``W`` steps of warm-up and ``D`` of decay, the learning rate of update ``n``,
counted from 0, is

===================  =====================================================================
warm-up, n < W       ``P * (n + 1) / (W + 1)``
constant             ``P``
linear               ``P + (E - P) * x``
cosine               ``E + (P - E) * (1 + cos(pi * x)) / 2``
warmup-stable-decay  ``P`` up to ``D`` updates before the last one, then ``P + (E - P) * x``
===================  =====================================================================

where ``x`` goes evenly from 0, at the beginning of the decay, to 1, ``D`` updates later, and stays there. Updates that
were skipped are not counted.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from rrfp_jax.field_rules import matches
from rrfp_jax.programs.update_functions import averaged, on_host
from rrfp_jax.training.run_config import (
    ADAFACTOR,
    ADAMW,
    AVERAGE_DECAY,
    CONSTANT,
    COSINE,
    LION,
    MUON,
    OPTIMIZERS,
    SGD,
    STABLE,
    OptimizerConfig,
    ParameterGroup,
)

_Settings = Mapping[str, Any]


def _is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Returns whether an array is a matrix or a stack of them; the biases of experts are a stack of vectors."""
    return leaf.ndim > 1 and not path_of(path).endswith("_bias")


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the optimizer of parameters that are a dictionary from layer name to nested dictionaries.

    Call :func:`check_groups` first. The pipeline clips the global norm, not the optimizer.
    """

    def decayed(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        group = _group_of(config, path_of(path))
        own = None if group is None else group.weight_decay
        decay = config.arguments["weight_decay"] if own is None else own
        # matrices and stacks of them; norm scales and biases are not decayed
        return update + decay * param if decay and _is_matrix(path, param) else update

    def scaled(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        group = _group_of(config, path_of(path))
        return update if group is None or group.learning_rate_scale == 1 else update * group.learning_rate_scale

    parts = [] if not config.arguments["feedback"] else [fed_back()]
    # decay behind the direction is decoupled from its moments, and before the rate it is scaled by it
    optimizer = optax.chain(
        _DIRECTIONS[config.name](config.arguments),
        optax.stateless(lambda updates, params: jax.tree.map_with_path(decayed, updates, params)),
        optax.scale_by_learning_rate(schedule),
        optax.stateless(lambda updates, params: jax.tree.map_with_path(scaled, updates)),
        *parts,
    )
    decay = config.arguments.get(AVERAGE_DECAY)
    optimizer = optimizer if decay is None else averaged(optimizer, decay)
    return on_host(optimizer) if config.on_host else optimizer


class FeedbackState(NamedTuple):
    """The state of :func:`fed_back`."""

    last: Any
    """The update before, as it came in."""


def fed_back() -> optax.GradientTransformation:
    """Returns a part of an optimizer that applies ``2 * u[t] - u[t - 1]`` in place of the update ``u[t]``.

    Where gradients are taken one update late, it makes up for the step that is missing (2606.30634, error feedback; the
    formula is inferred from its description). The update before the first is 0.
    """

    def init(params: Any) -> FeedbackState:
        return FeedbackState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: FeedbackState, params: Any = None) -> tuple[Any, FeedbackState]:
        del params
        return jax.tree.map(lambda new, last: 2 * new - last, updates, state.last), FeedbackState(updates)

    return optax.GradientTransformation(init, update)


# -- groups of parameters ----------------------------------------------------------------------------------------------


def check_groups(config: OptimizerConfig, params: Any) -> None:
    """Raises ValueError for a group that has no parameter, and for a pattern that matches none.

    ``params`` are all parameters that train, or their shapes.
    """
    paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    example = next((path for path in paths if path.count(".") > 1), paths[0])
    taken = {id(group) for path in paths if (group := _group_of(config, path)) is not None}
    for number, group in enumerate(config.groups):
        if id(group) in taken:
            continue
        name = f"optimizer.groups[{number}] ({', '.join(group.match)})"
        if any(matches(pattern, path) for path in paths for pattern in group.match):
            raise ValueError(f"all that {name} matches is in groups before it: move it up, or leave it out")
        raise ValueError(f"{name} matches no parameter that is trained: paths are such as {example}")
    patterns = [(f"groups[{number}].match", p) for number, group in enumerate(config.groups) for p in group.match]
    # the default patterns are for all models, so they need not match
    own = set(config.arguments.get("adam_parameters", ())) - set(OPTIMIZERS[MUON]["adam_parameters"])
    for field, pattern in [*patterns, *(("arguments.adam_parameters", p) for p in sorted(own))]:
        if not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"optimizer.{field} has {pattern!r}, which matches no parameter that is trained: paths are such as "
                f"{example}"
            )


def path_of(path: tuple[Any, ...]) -> str:
    """Returns the path of a parameter as text, for example ``layers.3.mlp.up.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _group_of(config: OptimizerConfig, path: str) -> ParameterGroup | None:
    """Returns the first group that matches a parameter."""
    return next((group for group in config.groups if any(matches(pattern, path) for pattern in group.match)), None)


# -- directions --------------------------------------------------------------------------------------------------------


def _adam(settings: _Settings, *, nesterov: bool = False) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=settings["b1"], b2=settings["b2"], eps=settings["eps"], nesterov=nesterov)


def _adafactor(settings: _Settings) -> optax.GradientTransformation:
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


def _muon(settings: _Settings) -> optax.GradientTransformation:
    """Returns Muon for arrays of two dimensions or more, and Adam for the rest.

    Muon's direction is the momentum, made nearly orthogonal by Newton-Schulz steps (Jordan et al. 2024), matrix by
    matrix. An array ``[..., rows, columns]`` is a stack of matrices: the experts of a layer are orthogonalised each by
    itself. With ``consistent_rms`` the entries of an update have about this root mean square (Liu et al. 2025); with 0
    its spectral norm is about ``sqrt(max(1, columns / rows))``.

    The steps need whole matrices, and programs see whole arrays wherever these lie: where a mesh cuts a matrix, or
    replicas share the momentum, the compiler brings the parts together.
    """

    def labels(params: Any) -> Any:
        def label(path: tuple[Any, ...], leaf: Any) -> str:
            is_adam = any(matches(pattern, path_of(path)) for pattern in settings["adam_parameters"])
            return "muon" if _is_matrix(path, leaf) and not is_adam else "adam"

        return jax.tree.map_with_path(label, params)

    def scaled(update: jax.Array) -> jax.Array:
        rows, columns = update.shape[-2:]
        by_rms = math.sqrt(max(rows, columns)) * settings["consistent_rms"]
        return update * (by_rms or math.sqrt(max(1, columns / rows)))

    orthogonal = contrib.scale_by_muon(
        beta=settings["momentum"],
        nesterov=settings["nesterov"],
        ns_steps=settings["newton_schulz_steps"],
        # the last two dimensions of a stack are its matrices
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), updates),
    )
    muon = optax.chain(orthogonal, optax.stateless(lambda updates, params: jax.tree.map(scaled, updates)))
    return optax.partition({"muon": muon, "adam": _adam(settings)}, labels)


_DIRECTIONS: Mapping[str, Callable[[_Settings], optax.GradientTransformation]] = {
    ADAMW: lambda settings: _adam(settings, nesterov=settings["nesterov"]),
    LION: lambda settings: optax.scale_by_lion(b1=settings["b1"], b2=settings["b2"]),
    SGD: lambda settings: (
        optax.trace(decay=settings["momentum"], nesterov=settings["nesterov"])
        if settings["momentum"]
        else optax.identity()
    ),
    MUON: _muon,
    ADAFACTOR: _adafactor,
}


# -- learning rates ----------------------------------------------------------------------------------------------------


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate of each update of a run of ``num_steps`` steps, as a function that may be traced.

    A decay without ``decay_steps`` has its final rate at the last step, and begins after the warm-up, or for
    warmup-stable-decay a tenth of the steps before. A warm-up that is as long as the run, or longer, is cut off, and
    nothing decays; a decay for which the run is too short takes the steps that are left after the warm-up.
    """
    peak, warmup, last = config.learning_rate, config.warmup_steps, max(num_steps - 1, config.warmup_steps + 1)
    first = peak / (warmup + 1)
    rise = optax.linear_schedule(first, peak, warmup)
    if config.schedule == CONSTANT:
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    assert config.final_learning_rate is not None
    if config.schedule == STABLE:
        length = -(-num_steps // 10) if config.decay_steps is None else config.decay_steps
        begin = max(warmup, last - length)
        length = last - begin
    else:
        begin, length = warmup, last - warmup if config.decay_steps is None else config.decay_steps
    if config.schedule == COSINE:
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, warmup + length, config.final_learning_rate)
    fall = optax.linear_schedule(peak, config.final_learning_rate, length, begin - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def rates_changed(config: OptimizerConfig, before: int, now: int, step: int, update: int) -> str:
    """Returns in words how the learning rates of a run change when its number of steps does.

    The run had ``before`` steps in all, now has ``now`` of them, and goes on at ``step`` with update number ``update``.
    """
    if config.schedule == CONSTANT or (config.decay_steps is not None and config.schedule != STABLE):
        return "its learning rates stay as they are"
    was, becomes = (float(learning_rate_schedule(config, num_steps)(update)) for num_steps in (before, now))
    # updates fall behind steps by those that were skipped
    last = float(learning_rate_schedule(config, now)(max(update, update + now - 1 - step)))
    return (
        f"its learning rates change, to {becomes:.2e} at step {step}, which was to have {was:.2e}, and {last:.2e} at "
        "the last"
    )
