"""Models to order, with the memory that their stages have: eight stages, 32 microbatches.

``homogeneous`` is 32 equal layers, a stage's F = I = W = 10 ms, nothing lost between stages; memory is in microbatches
of a stage. ``Gemma-like`` has 42 layers and a head of a large vocabulary, which holds nothing. ``encoder + LM`` has 24
encoder layers, which take and hold half as much, 32 of a language model, and a head. Memory of the latter two is in
layers of the language model.
"""

from dataclasses import dataclass

from rrfp_jax.costs import LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.schedules import Placement, linear, looped, v_shaped, waves

NUM_STAGES, NUM_MICROBATCHES = 8, 32
PLACEMENTS: dict[str, Placement] = {
    "linear": linear(NUM_STAGES),
    "V": v_shaped(NUM_STAGES),
    "looped, 2 chunks": looped(NUM_STAGES, 2),
    "waves, 4 chunks": waves(NUM_STAGES, 2),
    "looped, 4 chunks": looped(NUM_STAGES, 4),
}
UNIT = 1000
"""Bytes of a layer's activations; small ones, so that parts of them are whole numbers."""


@dataclass(frozen=True)
class Case:
    """A model, and the memory that each stage has for activations, in layers of the model."""

    name: str
    costs: ModelCosts
    memory: float
    unit: float = UNIT
    """Bytes of one unit of memory."""

    @property
    def limit(self) -> int:
        return round(self.memory * self.unit)


def _layer(forward_ms: float, input_ms: float, weight_ms: float, held: float) -> LayerCosts:
    held_bytes = round(held * UNIT)
    return LayerCosts(
        forward_ms=forward_ms,
        input_gradient_ms=input_ms,
        weight_gradient_ms=weight_ms,
        stash_bytes=held_bytes,
        owed_bytes=held_bytes,
    )


def homogeneous(memory: float) -> Case:
    """Returns the case of equal layers; memory is in microbatches."""
    costs = ModelCosts(layers=("layer",) * 32, types={"layer": _layer(2.5, 2.5, 2.5, 1)})
    return Case("homogeneous", costs, memory, 4 * UNIT)


def gemma_like(memory: float) -> Case:
    """Returns the case with a head of 4.6 layers."""
    types = {"layer": _layer(2.0, 2.1, 1.7, 1), "head": _layer(9.2, 9.2, 9.2, 0)}
    links = LinkCosts(latency_ms=0.3)
    return Case("Gemma-like", ModelCosts(layers=("layer",) * 42 + ("head",), types=types, links=links), memory)


def encoder_and_lm(memory: float) -> Case:
    """Returns the case of an encoder whose layers take and hold half as much as those of the language model."""
    types = {"encoder": _layer(1.0, 1.0, 1.0, 0.5), "layer": _layer(2.0, 2.1, 1.7, 1), "head": _layer(6.0, 6.0, 6.0, 0)}
    layers = ("encoder",) * 24 + ("layer",) * 32 + ("head",)
    return Case("encoder + LM", ModelCosts(layers=layers, types=types, links=LinkCosts(latency_ms=0.5)), memory)


CASES = [
    *(homogeneous(memory) for memory in (3, 4, 5, 6, 7, 8, 12, 16)),
    *(gemma_like(memory) for memory in (42, 30, 21)),
    encoder_and_lm(44),
]
