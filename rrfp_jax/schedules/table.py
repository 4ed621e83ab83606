"""The table of a schedule: for every stage, the order of its tasks.

A table is one thing used in three ways: run strictly (each stage waits for its next entry), used as a hint (the rank
in the table breaks ties among ready tasks), and simulated. It says nothing about time: an empty cell only shows where
the construction left a gap, and execution ignores it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rrfp_jax.field_rules import check_types, with_type
from rrfp_jax.schedules.validation import check_orders, out_of_order, peak_in_flight
from rrfp_jax.tasks import PipelineGraph, Placement, Task


@dataclass(frozen=True)
class ScheduleTable:
    """Who runs what, in which order.

    ``rows[s]`` holds the cells of stage ``s``; None is an empty slot. Construction checks only the number of rows, so
    that a broken table can be looked at; :meth:`validate` checks the rest.
    """

    name: str
    placement: Placement
    graph: PipelineGraph
    rows: tuple[tuple[Task | None, ...], ...]
    weights_fill: bool = field(default=False, compare=False)
    """Whether W stand where a stage would idle, so that as a hint they rank behind all F and I, wherever memory has
    room for more than these rows hold."""
    hint: "ScheduleTable | None" = field(default=None, compare=False)
    """What ranks what is ready in place of these rows, where they suit strict consumption alone. A file holds neither
    this nor the above, and equal rows make equal tables."""

    def __post_init__(self) -> None:
        check_types(self, "name", "placement", "graph", "weights_fill", "hint")
        rows: Any = self.rows
        if not isinstance(rows, tuple | list) or not all(isinstance(row, tuple | list) for row in rows):
            raise ValueError(f"rows is {with_type(rows)}: give a tuple of tasks for each stage")
        if len(self.rows) != self.placement.num_stages:
            raise ValueError(
                f"table {self.name!r} has {len(self.rows)} rows, its placement {self.placement.num_stages} stages: "
                "give one row per stage"
            )
        if self.graph.num_chunks != self.placement.num_chunks:
            raise ValueError(
                f"table {self.name!r}: the graph has {self.graph.num_chunks} chunks, the placement "
                f"{self.placement.num_chunks}: give both the same chunks"
            )

    @classmethod
    def from_orders(
        cls, name: str, placement: Placement, graph: PipelineGraph, orders: Iterable[Iterable[Task]]
    ) -> "ScheduleTable":
        """A table without empty slots."""
        return cls(name, placement, graph, tuple(tuple(order) for order in orders))

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each stage, in order, without the empty slots."""
        return tuple(tuple(task for task in row if task is not None) for row in self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """16 digits that tell these orders from others: the head of the SHA-256 of their tasks, a line per stage."""
        lines = "\n".join(" ".join(map(str, order)) for order in self.orders)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def validate(self) -> "ScheduleTable":
        """Return the table itself if every stage can run its row to the end and all tasks appear exactly once.

        Raises ValueError, in one sentence, for a row that names a task that the graph does not have or that lives on
        another stage, for a duplicated or missing task, and for a deadlock (with the cycle of tasks that wait for each
        other).
        """
        assert self.execution is not None
        return self

    @cached_property
    def execution(self) -> tuple[Task, ...]:
        """All tasks in an order in which the stages can finish them, each keeping to its row.

        Raises ValueError as :meth:`validate`.
        """
        return check_orders(self.name, self.placement, self.graph, self.orders)

    @property
    def was_validated(self) -> bool:
        """Whether :meth:`validate` has found nothing wrong."""
        return "execution" in self.__dict__

    def as_hint(self, *, weights_fill: bool, hint: "ScheduleTable | None") -> "ScheduleTable":
        """The same rows, with what they are as a hint."""
        made = replace(self, weights_fill=weights_fill, hint=hint)
        made.__dict__.update({name: self.__dict__[name] for name in ("orders", "execution") if name in self.__dict__})
        return made

    def peak_in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches that each stage holds at once, from first F there to last B or W there."""
        return tuple(peak_in_flight(order) for order in self.orders)

    def peak_activations(self, chunk_parts: Sequence[float] = ()) -> tuple[float, ...]:
        """The largest number of activations that each stage holds at once.

        One unit is what a stage keeps of one microbatch over all its chunks (of one direction, if the pipeline is
        bidirectional); each chunk keeps an equal part of it, or one in the proportions of ``chunk_parts``, from F to
        B or W.
        """
        sizes = relative_sizes(chunk_parts, self.graph.num_chunks)
        return tuple(
            self._peak_passes(stage, sizes) / self.graph.passes_per_microbatch(chunks)
            for stage, chunks in enumerate(self.placement.chunks_of_stage)
        )

    def check_window(self, window: int | Sequence[int]) -> None:
        """Raise ValueError if some stage holds more microbatches than its window (one for all, or one per stage)."""
        windows = [window] * self.num_stages if isinstance(window, int) else list(window)
        if len(windows) != self.num_stages:
            raise ValueError(
                f"{len(windows)} windows do not fit the {self.num_stages} stages of table {self.name!r}: "
                "give one number, or one per stage"
            )
        for stage, (peak, limit) in enumerate(zip(self.peak_in_flight(), windows, strict=True)):
            if peak > limit:
                raise ValueError(
                    f"table {self.name!r} holds {peak} microbatches on stage {stage}, but the window there is {limit}: "
                    f"raise the window to {peak}, or take a schedule with a lower peak"
                )

    def check_accumulation(self) -> None:
        """Raise ValueError unless every chunk adds up its gradients in microbatch order."""
        found = out_of_order(self.graph, self.orders)
        if found is not None:
            raise ValueError(
                f"schedule {self.name!r} runs {found[0]} before {found[1]}, and deterministic runs add gradients up in "
                "microbatch order: take a schedule with its backwards in that order, or only rank by it (ready, with "
                "footprint off)"
            )

    def _peak_passes(self, stage: int, sizes: Sequence[float]) -> float:
        peak = held = 0.0
        for task in self.orders[stage]:
            takes, frees = self.graph.memory_effect(task)
            held += takes * sizes[task.chunk]
            peak = max(peak, held)
            held -= frees * sizes[task.chunk]
        return peak

    def __iter__(self) -> Iterator[tuple[Task | None, ...]]:
        return iter(self.rows)


def relative_sizes(chunk_parts: Sequence[float], num_chunks: int) -> tuple[float, ...]:
    """The chunks' sizes, 1 on average; all equal without parts. Raises ValueError unless there is a part per chunk."""
    if not chunk_parts:
        return (1.0,) * num_chunks
    if len(chunk_parts) != num_chunks:
        raise ValueError(f"{len(chunk_parts)} chunk parts for {num_chunks} chunks: give one per chunk")
    return tuple(part * num_chunks / sum(chunk_parts) for part in chunk_parts)
