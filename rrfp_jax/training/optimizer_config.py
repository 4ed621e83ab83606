"""The optimizer of a run, its schedule of learning rates, and groups of parameters with other settings: pure data.

Each name takes some of the fields; a field of another optimizer is refused, and a field that is not given gets the
name's own default. A resolved configuration therefore has every number that counts, and None for all others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Rule, check_fields, fill_fields

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
"""The fields that each optimizer takes, with their defaults."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    CONSTANT: {},
    COSINE: {"final_learning_rate": 0.0, "decay_steps": None},
    LINEAR: {"final_learning_rate": 0.0, "decay_steps": None},
    STABLE: {"final_learning_rate": 0.0, "decay_steps": None},
}
"""The fields that each schedule takes, with their defaults."""

_DECAY = Rule("at least 0 and less than 1", lambda value: 0 <= value < 1)
_THRESHOLD = Rule("at least 1, or 0 for no clipping", lambda value: value == 0 or 1 <= value < math.inf)


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
    """The optimizer, and how its learning rate goes up and down.

    Raises ValueError, with the remedy, for a field that the optimizer or the schedule does not have.
    """

    learning_rate: float
    """Peak learning rate."""
    name: str = ADAMW
    """``adamw``, ``lion``, ``sgd``, ``adafactor``, or ``muon``, which is for matrices and has Adam for the rest."""
    schedule: str = COSINE
    """How the rate goes on after the warm-up: ``constant``, down by a ``cosine`` or ``linear``, or
    ``warmup-stable-decay``, at its peak until it goes down to the end."""
    final_learning_rate: float | None = None
    """Learning rate at the end of the decay, which is the last step unless ``decay_steps`` says otherwise, and from
    there on; None: 0."""
    warmup_steps: int = 0
    """Steps before the one with the peak; the rate rises evenly, from ``learning_rate / (warmup_steps + 1)`` on."""
    decay_steps: int | None = None
    """Steps that the decay takes: the first ones after the warm-up, with ``warmup-stable-decay`` the last ones of the
    run; None: all after the warm-up, with ``warmup-stable-decay`` a tenth of the run."""
    b1: float | None = None
    """Decay of the first moment; None: 0.9."""
    b2: float | None = None
    """Decay of the second moment, of Lion's momentum; None: 0.95, of Lion 0.99."""
    eps: float | None = None
    """Added to the root of the second moment, by Adafactor to squared gradients; None: 1e-8, of Adafactor 1e-30."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices, times the learning rate; vectors (norm scales) are not decayed; None: 0.1, of
    SGD and Adafactor 0."""
    momentum: float | None = None
    """Decay of the sum of gradients (SGD), or of their mean (Muon); None: 0.95 of Muon, 0 of SGD."""
    nesterov: bool | None = None
    """Whether momentum looks ahead (Nesterov); None: true of Muon, false of SGD."""
    newton_schulz_steps: int | None = None
    """Steps in which Muon makes a matrix nearly orthogonal; None: 5."""
    consistent_rms: float | None = None
    """Root mean square of the entries of Muon's updates, before the learning rate; 0: updates have the spectral norm
    ``sqrt(max(1, columns / rows))``; None: 0.2, about Adam's."""
    adam_parameters: tuple[str, ...] | None = None
    """Paths or globs of matrices that Muon leaves to Adam, as it does vectors; None: those of embedding, head and
    positions."""
    decay_rate: float | None = None
    """Exponent by which Adafactor's second moment forgets; None: 0.8."""
    clipping_threshold: float | None = None
    """Root mean square beyond which Adafactor clips the update of a parameter, 0 for no clipping; None: 1."""
    multiply_by_parameter_scale: bool | None = None
    """Whether Adafactor's updates are multiplied by the root mean square of the parameter; None: true."""
    min_dim_size_to_factor: int | None = None
    """Rows and columns from which on Adafactor keeps their means in place of a second moment; None: 128."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or weight decay; of several groups that match, the first one counts."""

    def __post_init__(self) -> None:
        fill_fields(self, "name", "name", OPTIMIZERS)
        fill_fields(self, "schedule", "schedule", SCHEDULES)
        check_fields(self, POSITIVE, "learning_rate", "eps")
        check_fields(self, NOT_NEGATIVE, "final_learning_rate", "warmup_steps", "weight_decay", "consistent_rms")
        check_fields(self, _DECAY, "b1", "b2", "momentum")
        check_fields(self, POSITIVE, "decay_rate")
        check_fields(self, _THRESHOLD, "clipping_threshold")
        check_fields(self, AT_LEAST_1, "decay_steps", "newton_schulz_steps", "min_dim_size_to_factor")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along the momentum, which is 0: give momentum, or nesterov false")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the optimizer has, by name."""
        return {field: getattr(self, field) for field in OPTIMIZERS[self.name]}

    def num_moments(self, *, is_matrix: bool = True) -> int:
        """Returns how many numbers the state has for every parameter of a matrix or another array; few more are
        neglected."""
        if self.name == MUON:
            return 1 if is_matrix else 2
        return {ADAMW: 2, LION: 1, SGD: int(bool(self.momentum)), ADAFACTOR: 0 if is_matrix else 1}[self.name]
