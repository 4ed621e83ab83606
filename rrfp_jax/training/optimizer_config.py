"""The optimizer of a run, its schedule of learning rates, and groups of parameters with other settings: pure data.

Each optimizer takes some arguments; one of another optimizer is refused, and one that is not given gets its default. A
resolved configuration therefore has every number that counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.bounded_text import shown
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields, fill_fields

ADAMW, LION, SGD, MUON, ADAFACTOR = "adamw", "lion", "sgd", "muon", "adafactor"
CONSTANT, COSINE, LINEAR, STABLE = "constant", "cosine", "linear", "warmup-stable-decay"

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    ADAMW: {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    LION: {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1},
    SGD: {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    MUON: {
        "momentum": 0.95,
        "nesterov": True,
        "newton_schulz_steps": 5,
        "consistent_rms": 0.2,
        "adam_parameters": ("*embedding.table", "*head.kernel", "*positions"),
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    },
    ADAFACTOR: {
        "decay_rate": 0.8,
        "clipping_threshold": 1.0,
        "multiply_by_parameter_scale": True,
        "min_dim_size_to_factor": 128,
        "eps": 1e-30,
        "weight_decay": 0.0,
    },
}
"""Arguments that each optimizer takes, with their defaults."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    CONSTANT: {},
    COSINE: {"final_learning_rate": 0.0, "decay_steps": None},
    LINEAR: {"final_learning_rate": 0.0, "decay_steps": None},
    STABLE: {"final_learning_rate": 0.0, "decay_steps": None},
}
"""Fields that each schedule takes, with their defaults."""

_NORM = FieldRule("a positive number, or null for no clipping", POSITIVE.holds)
_DECAY = FieldRule("at least 0 and less than 1", lambda value: 0 <= value < 1)
_THRESHOLD = FieldRule("at least 1, or 0 for no clipping", lambda value: value == 0 or 1 <= value < math.inf)
_RULES = {
    **dict.fromkeys(("eps", "decay_rate"), POSITIVE),
    **dict.fromkeys(("weight_decay", "consistent_rms"), NOT_NEGATIVE),
    **dict.fromkeys(("b1", "b2", "momentum"), _DECAY),
    **dict.fromkeys(("newton_schulz_steps", "min_dim_size_to_factor"), AT_LEAST_1),
    "clipping_threshold": _THRESHOLD,
}
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("nesterov", "multiply_by_parameter_scale"), bool),
    **dict.fromkeys(("newton_schulz_steps", "min_dim_size_to_factor"), int),
    "adam_parameters": tuple,
}
"""Types of the arguments that are no real numbers."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are updated otherwise than the rest."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    match: tuple[str, ...]
    """Paths of parameters, such as ``layers.3.mlp.up.kernel``: whole, or their beginning up to a dot, or globs, in
    which ``*`` matches dots too."""
    learning_rate_scale: float = 1.0
    """Factor of the learning rate."""
    weight_decay: float | None = None
    """Weight decay of the group's matrices; None: the optimizer's."""

    def __post_init__(self) -> None:
        check_fields(self, NOT_NEGATIVE, "learning_rate_scale", "weight_decay")
        if not self.match:
            raise ValueError("a group of parameters matches nothing: give its match some paths or globs")
        if self.learning_rate_scale == 1 and self.weight_decay is None:
            raise ValueError(
                f"the group {', '.join(self.match)} changes nothing: give it a learning_rate_scale or a weight_decay"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rates, and the parameters that it changes.

    Raises ValueError, with the remedy, for an argument that the optimizer does not take.
    """

    learning_rate: float
    """The peak learning rate."""
    name: str = ADAMW
    """The optimizer: ``adamw``, ``lion``, ``sgd``, ``adafactor``, or ``muon``, which is for matrices and has Adam for
    the rest."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The coefficients of the optimizer by name, such as ``{b2: 0.99, weight_decay: 0.01}``; the others keep its
    defaults. ``rrfp train --print-config`` prints all of them. ``weight_decay`` is decoupled, times the learning rate,
    and spares vectors (norm scales). ``consistent_rms`` of Muon is the root mean square of the entries of an update, 0
    for the spectral norm ``sqrt(max(1, columns / rows))``; its ``adam_parameters`` are paths or globs of the matrices
    that it leaves to Adam."""
    schedule: str = COSINE
    """How the rate goes on after the warm-up: ``constant``, down by a ``cosine`` or ``linear``, or
    ``warmup-stable-decay``, at its peak until it goes down to the end."""
    warmup_steps: int = 0
    """The number of steps before the one with the peak; the rate rises evenly, from ``learning_rate / (warmup_steps +
    1)`` on."""
    decay_steps: int | None = None
    """The number of steps that the decay takes: the first ones after the warm-up, with ``warmup-stable-decay`` the last
    ones of the run. None: all after the warm-up, with ``warmup-stable-decay`` a tenth of the run."""
    final_learning_rate: float | None = None
    """The learning rate at the end of the decay, which is the last step unless ``decay_steps`` says otherwise, and from
    there on. None: 0."""
    clip_norm: float | None = 1.0
    """The largest global norm of the gradient. None: no clipping."""
    freeze: tuple[str, ...] = ()
    """The layers that never change: names, the part of names before a dot (``vision``), or globs."""
    shard: bool = False
    """Whether the replicas share the optimizer state (ZeRO-1); needs ``pipeline.replicas`` of at least 2."""
    groups: tuple[ParameterGroup, ...] = ()
    """The parameters with another learning rate or weight decay; of several groups that match, the first one counts."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"name is {self.name!r}: give one of {', '.join(OPTIMIZERS)}")
        known = OPTIMIZERS[self.name]
        if (odd := next((key for key in self.arguments if key not in known), None)) is not None:
            raise ValueError(f"arguments has {odd!r}, which {self.name} does not take: it takes {', '.join(known)}")
        given = {key: value for key, value in self.arguments.items() if value is not None}
        object.__setattr__(self, "arguments", {key: _checked(key, value) for key, value in {**known, **given}.items()})
        fill_fields(self, "schedule", "schedule", SCHEDULES)
        check_fields(self, POSITIVE, "learning_rate")
        check_fields(self, _NORM, "clip_norm")
        check_fields(self, NOT_NEGATIVE, "final_learning_rate", "warmup_steps")
        check_fields(self, AT_LEAST_1, "decay_steps")
        if self.arguments.get("nesterov") and not self.arguments["momentum"]:
            raise ValueError("nesterov looks ahead along the momentum, which is 0: give momentum, or nesterov false")

    def num_moments(self, *, is_matrix: bool = True) -> int:
        """Returns how many numbers the state has for every parameter of a matrix or another array; few more are
        neglected."""
        if self.name == MUON:
            return 1 if is_matrix else 2
        is_kept = bool(self.arguments.get("momentum"))
        return {ADAMW: 2, LION: 1, SGD: int(is_kept), ADAFACTOR: 0 if is_matrix else 1}[self.name]


def _checked(name: str, value: Any) -> Any:
    """Returns an argument of an optimizer as its type has it; raises ValueError, with the remedy, if it cannot be."""
    kind = _KINDS.get(name, float)
    if kind is tuple:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"{name} is {shown(value)}: give a list of texts")
        return tuple(listed)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        is_fit, words = isinstance(value, bool), "true or false"
    elif kind is int:
        is_fit, words = is_number and value == int(value), "a whole number"
    else:
        is_fit, words = is_number, "a number"
    if not is_fit:
        raise ValueError(f"{name} is {shown(value)}: give {words}")
    if (rule := _RULES.get(name)) is not None and not rule.holds(value):
        raise ValueError(f"{name} is {shown(value)}: give {rule.words}")
    return kind(value)
