"""How rotary embeddings are stretched to longer texts than the weights were first trained on: a record, pure data."""

import math
from dataclasses import dataclass
from typing import Any

from rrfp_jax.field_rules import Rule, check_fields, check_types, fill_fields

_ABOVE_0 = Rule("a number above 0", lambda value: 0 < value < math.inf)
LLAMA3, LINEAR, YARN = "llama3", "linear", "yarn"
KINDS: dict[str, dict[str, Any]] = {
    LLAMA3: {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192},
    LINEAR: {},
    YARN: {"original_max_positions": None, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
}
"""The fields that each has beside ``factor``, and what null stands for."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How waves are stretched, after a kind that Hugging Face calls ``rope_type``.

    A wave's *turns* are how many of it fit into ``original_max_positions``.

    ========  =========================================================================================================
    llama3    waves of at least ``high_freq_factor`` turns stay, those of at most ``low_freq_factor`` become ``factor``
              times as long; between the two the change is linear in the turns (Llama 3.1)
    linear    all waves become ``factor`` times as long (Chen et al. 2023)
    yarn      waves of at least ``beta_fast`` turns stay, those of at most ``beta_slow`` become ``factor`` times as
              long; between the two the change is linear in the number of the wave, from its whole number at or before
              the one bound to that at or behind the other. Queries and keys are multiplied by ``attention_factor``
              (Peng et al. 2023; Qwen 2.5 beyond 32768 tokens)
    ========  =========================================================================================================

    Raises ValueError, with the remedy, for a field that the kind does not have, or for one that means nothing.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    factor: float
    """How many times longer the longest waves become."""
    kind: str = LLAMA3
    """``llama3``, ``linear`` or ``yarn``."""
    low_freq_factor: float | None = None
    """A wave that fits at most so often is stretched in full; None: 1."""
    high_freq_factor: float | None = None
    """A wave that fits at least so often is not stretched; None: 4."""
    original_max_positions: int | None = None
    """Length of the texts of the first training, in tokens; None: 8192 of ``llama3``; ``yarn`` needs it."""
    beta_fast: float | None = None
    """A wave that fits at least so often is not stretched; None: 32."""
    beta_slow: float | None = None
    """A wave that fits at most so often is stretched in full; None: 1."""
    attention_factor: float | None = None
    """What queries and keys are multiplied by; None: ``0.1 * log(factor) + 1``, or 1 for a factor below 1."""

    def __post_init__(self) -> None:
        check_types(self)
        fill_fields(self, "kind", "rope_scaling", KINDS)
        check_fields(self, _ABOVE_0, "factor", *dict.fromkeys(name for fields in KINDS.values() for name in fields))
        if self.kind == LLAMA3:
            self._check_bounds("low_freq_factor", "high_freq_factor")
        if self.kind == YARN:
            self._check_bounds("beta_slow", "beta_fast")
            if self.original_max_positions is None:
                raise ValueError(
                    "rope_scaling yarn has no original_max_positions: give the tokens of the first training's texts"
                )
            if self.attention_factor is None:
                object.__setattr__(self, "attention_factor", 0.1 * math.log(max(self.factor, 1.0)) + 1.0)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the kind has beside ``factor``, by name."""
        return {field: getattr(self, field) for field in KINDS[self.kind]}

    def _check_bounds(self, low: str, high: str) -> None:
        if getattr(self, low) >= getattr(self, high):
            raise ValueError(
                f"rope_scaling stretches between {getattr(self, low)} and {getattr(self, high)} waves: give a "
                f"{high} above {low}"
            )
