"""A model cut into chunks that lie on stages: the times of its tasks, and the bytes of its chunks.

A cut as one line of text, in the manner of Megatron's pipeline layouts: ``Et*6|t*6|t*5L``.

A letter stands for a layer, ``*N`` repeats it, and ``|`` stands between two chunks: E is the embedding, t a decoder's
layer, L the head with the loss; of an encoder, P makes vectors of patches, v is a layer, p the projector; < is the
attention of a layer and > its MLP. Other types get letters of their own (:func:`letters_of`). With ``short``,
``(t*6|)*5`` stands for so many equal chunks, each with the bar behind it.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.costs.forecast import ChunkBytes
from rrfp_jax.costs.layer_costs import HALVES, LayerCosts, LinkCosts, ModelCosts, is_half
from rrfp_jax.schedules import PipelineGraph, Placement, chain
from rrfp_jax.simulation import Costs, Links, Machine
from rrfp_jax.simulation.costs import Durations


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """Consecutive layers in chunks, chunks on stages. Raises ValueError for a cut that loses a layer, has an empty
    chunk or one that passes an end, or does not fit the placement."""

    costs: ModelCosts
    counts: tuple[int, ...]
    """Layers of each chunk, ends of the model included."""
    placement: Placement
    num_microbatches: int
    split: bool = True
    """Whether the backward runs as two tasks."""
    replicas: int | tuple[int, ...] = 1
    """Replicas of the whole pipeline, or of each stage, whose gradients are summed once per step; microbatches are
    those of one replica, where a stage has most."""
    own_costs: tuple[ModelCosts, ...] = ()
    """The costs of each chunk's layers where chunks run in different ways; empty: ``costs`` for all."""

    def __post_init__(self) -> None:
        total, chunks = sum(self.counts), self.placement.num_chunks
        if total != self.costs.num_layers or len(self.counts) != chunks or min(self.counts) < 1:
            raise ValueError(
                f"the cut {list(self.counts)} does not deal {self.costs.num_layers} layers to {chunks} chunks: give "
                "every chunk at least one, and all of them"
            )
        for start, stop in self.bounds:
            passed = [end for end in range(start, stop - 1) if end in self.costs.ends]
            if passed:
                raise ValueError(f"a chunk of {list(self.counts)} passes the end behind layer {passed[0]}: cut there")

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First layer and the one behind the last, of each chunk."""
        return list(pairwise(accumulate(self.counts, initial=0)))

    @property
    def layer_counts(self) -> tuple[float, ...]:
        """Layers of each chunk, ends included; a part of a layer is a half."""
        halves = [self.costs.layers[start:stop] for start, stop in self.bounds]
        numbers = [len(layers) - sum(map(is_half, layers)) / 2 for layers in halves]
        return tuple(number if number % 1 else int(number) for number in numbers)

    @cached_property
    def graph(self) -> PipelineGraph:
        """A chain of the chunks."""
        chunks = self.placement.num_chunks
        return chain(chunks, self.num_microbatches, split=self.split)

    def layers_of(self, chunk: int) -> list[LayerCosts]:
        """The costs of a chunk's layers."""
        stage = self.placement.stage_of_chunk[chunk]
        costs = self.own_costs[chunk] if self.own_costs else self.costs
        return [costs.of(layer, stage) for layer in range(*self.bounds[chunk])]

    def limits(self, memory_bytes: int | None) -> tuple[int | None, ...]:
        """The bytes of each stage's device; ``memory_bytes`` where stages do not differ."""
        return tuple(stage.limit for stage in self.costs.stages) or (memory_bytes,) * self.placement.num_stages

    @cached_property
    def durations_ms(self) -> Durations:
        """[1, chunks, microbatches, 3] for F, input gradient and weight gradient."""
        found = np.zeros((1, len(self.counts), self.num_microbatches, 3))
        for chunk in range(len(self.counts)):
            for layer in self.layers_of(chunk):
                found[0, chunk] += layer.task_ms(split=self.split)
        return found

    @property
    def task_lengths_ms(self) -> NDArray[np.float64]:
        """[chunks, microbatches, 3]: the durations with the host's time before each task."""
        found: NDArray[np.float64] = self.durations_ms[0].copy()
        found[..., : 3 if self.split else 2] += self.costs.task_ms
        return found

    @property
    def replicas_of_stage(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        number = self.replicas
        return (number,) * self.placement.num_stages if isinstance(number, int) else number

    @property
    def speeds_of_stage(self) -> tuple[tuple[float, ...], ...]:
        """The speeds of each stage's replicas, of which some are absent where stages have different numbers of them."""
        own = [stage.speeds or (stage.speed,) for stage in self.costs.stages] or [(1.0,)] * self.placement.num_stages
        return tuple(
            speeds if speeds[1:] else speeds * number
            for speeds, number in zip(own, self.replicas_of_stage, strict=True)
        )

    @cached_property
    def stage_work_ms(self) -> tuple[float, ...]:
        """All tasks of all microbatches of a replica of each stage, an equal part of those of the step; of the slowest
        one."""
        per_chunk, replicas = self.durations_ms[0].sum(axis=(1, 2)), self.replicas_of_stage
        return tuple(
            float(per_chunk[list(chunks)].sum()) * (max(replicas) / number)
            for chunks, number in zip(self.placement.chunks_of_stage, replicas, strict=True)
        )

    @cached_property
    def chunk_bytes(self) -> tuple[ChunkBytes, ...]:
        """Bytes of each chunk.

        The first chunk, which returns no gradient, leaves all of its backward to W, and so keeps its stash until then
        and the gradient that came, whatever its layers would owe elsewhere.
        """
        outputs = [self.costs.of(stop - 1).output_bytes for _, stop in self.bounds]
        found = []
        for chunk in range(len(self.counts)):
            layers = self.layers_of(chunk)
            is_first, is_last = chunk == 0, chunk == len(self.counts) - 1
            stash = layers[0].kept_bytes + sum(each.stash_bytes for each in layers)
            if len(layers) > 1:  # the second layer makes its input again
                stash -= layers[0].remade_bytes
            owed = sum(each.owed_bytes for each in layers)
            if is_first and not is_last:
                owed = stash + outputs[chunk]
            found.append(
                ChunkBytes(
                    fixed=sum(each.fixed_bytes for each in layers),
                    stash=stash,
                    owed=owed if self.split else 0,
                    inputs=0 if is_first else outputs[chunk - 1],
                    output_grads=0 if is_last else outputs[chunk],
                    outputs=max(0 if is_last else outputs[chunk], 0 if is_first else outputs[chunk - 1]),
                    temporaries=max(each.temporaries_bytes for each in layers)
                    + sum(each.added_bytes(split=self.split, is_first=is_first) for each in layers),
                    step_temporaries=sum(each.step_temporaries_bytes for each in layers),
                )
            )
        return tuple(found)

    @cached_property
    def links(self) -> Links:
        """Links between stages; between two of them the largest output that travels counts."""
        return self._links_of([(way, self.costs.link(*way), num_bytes) for way, num_bytes in self._sent])

    @property
    def unit_links(self) -> Links:
        """Links between all replicas of stages; replica r of stage s of S has the number ``r * S + s``."""
        num_stages, numbers = self.placement.num_stages, self.replicas_of_stage
        return self._links_of(
            [
                ((r * num_stages + a, q * num_stages + b), self.costs.link(a, b, (r, q)), num_bytes)
                for (a, b), num_bytes in self._sent
                for r in range(numbers[a])
                for q in range(numbers[b])
            ]
        )

    @property
    def _sent(self) -> list[tuple[tuple[int, int], int]]:
        """The bytes that travel from one stage to another, of each chunk's output and of its gradient."""
        stage_of = self.placement.stage_of_chunk
        return [
            (way, self.costs.of(stop - 1).output_bytes)
            for (a, b), (_, stop) in zip(pairwise(stage_of), self.bounds, strict=False)
            for way in ((a, b), (b, a))
            if a != b
        ]

    def _links_of(self, sent: Sequence[tuple[tuple[int, int], LinkCosts, int]]) -> Links:
        latency_ms = min((link.latency_ms for _, link, _ in sent), default=self.costs.links.latency_ms)
        extra_ms = dict[tuple[int, int], float]()
        for way, link, num_bytes in sent:
            more_ms = link.transfer_ms(num_bytes) - latency_ms
            if more_ms > 0:
                extra_ms[way] = max(more_ms, extra_ms.get(way, 0.0))
        return Links(latency_ms=latency_ms, extra_ms=extra_ms, control_ms=self.costs.links.control_ms)

    @cached_property
    def copies_ms(self) -> dict[int, float]:
        """Milliseconds to move what a chunk keeps of a microbatch to the host, or back, by chunk; without the last one,
        whose backward follows at once, and those whose way to the host is not known."""
        found = dict[int, float]()
        for chunk, stage in enumerate(self.placement.stage_of_chunk[:-1]):
            rate, num_bytes = self.costs.link(stage, stage).host_gb_per_s, self.chunk_bytes[chunk].stash
            if rate is not None and num_bytes:
                found[chunk] = num_bytes / rate / 1e6
        return found

    @property
    def machine(self) -> Machine:
        """The machine on which the simulator runs the cut."""
        return Machine(links=self.links, dispatch_overhead_ms=self.costs.task_ms)

    def simulated_costs(self, durations_ms: Durations | None = None) -> Costs:
        """Returns durations (its own, or draws of them) and the times of the tasks that end a step."""
        chunks = range(len(self.counts))
        gradients = [
            (sum(each.gradient_bytes for each in self.layers_of(chunk)), stage)
            for chunk, stage in enumerate(self.placement.stage_of_chunk)
        ]
        sums_ms = [
            self.costs.link(stage, stage).sum_ms(num_bytes, self.replicas_of_stage[stage])
            for num_bytes, stage in gradients
        ]
        return Costs(
            durations_ms=self.durations_ms if durations_ms is None else durations_ms,
            reduce_ms=tuple(sums_ms),
            update_ms=tuple(sum(each.update_ms for each in self.layers_of(chunk)) for chunk in chunks),
        )


_SIGNS = dict(zip(HALVES, "<>", strict=True))
_KNOWN = {"embed": "E", "head": "L", "loss": "L", "patch": "P", "project": "p", "encod": "v", "vision": "v"}
"""Parts of a type's name, and its letter."""
_WORTH_IT = 3
"""From so many equal chunks on they are written once."""


def letters_of(layers: Sequence[str]) -> dict[str, str]:
    """Returns a letter for each type of layer, in the order in which the types occur; the most common other one is
    t."""
    names = list(dict.fromkeys(layers))
    known = {name: [letter for part, letter in _KNOWN.items() if part in name.lower()] for name in names}
    letters = {name: found[0] for name, found in known.items() if found}
    letters |= {name: _SIGNS[name.rpartition(":")[2]] for name in names if is_half(name)}
    others = [name for name in names if name not in letters]
    for name in sorted(others, key=lambda name: ("decod" not in name.lower(), -layers.count(name))):
        wanted = ["t", *(letter for letter in name.lower() if letter in string.ascii_lowercase), *string.ascii_letters]
        letters[name] = next((letter for letter in wanted if letter not in letters.values()), "?")
    return {name: letters[name] for name in names}


def cut_in_words(cut: CutModel, *, short: bool = False) -> str:
    """Returns the line of a cut."""
    layers, letters = cut.costs.layers, letters_of(cut.costs.layers)
    chunks = []
    for start, stop in cut.bounds:
        runs = [(letter, len(list(run))) for letter, run in groupby(letters[name] for name in layers[start:stop])]
        chunks.append("".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs))
    if not short:
        return "|".join(chunks)
    parts = []
    for chunk, run in groupby(chunks[:-1]):  # the last chunk has no bar behind it, and so stands for itself
        count = len(list(run))
        parts.append(f"({chunk}|)*{count}" if count >= _WORTH_IT else f"{chunk}|" * count)
    return "".join([*parts, chunks[-1]])


def legend(cut: CutModel) -> str:
    """Returns the type of layer for each letter."""
    return ", ".join(f"{letter}: {name}" for name, letter in letters_of(cut.costs.layers).items())
