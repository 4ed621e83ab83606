"""Writing down a stage's order phase by phase, as the published constructions do."""

from collections import Counter
from dataclasses import dataclass, field

from rrfp_jax.tasks import Task, TaskKind


@dataclass
class OrderBuilder:
    """An order that grows by "the next microbatch" of a kind and chunk; microbatches are numbered as they come."""

    tasks: list[Task] = field(default_factory=list)
    counts: Counter[tuple[TaskKind, int]] = field(default_factory=Counter)

    def add(self, *passes: tuple[TaskKind, int], times: int = 1) -> None:
        """Append these (kind, chunk) passes in turn, ``times`` times, each for its next microbatch."""
        for _ in range(times):
            for kind, chunk in passes:
                self.tasks.append(Task(kind, chunk, self.counts[kind, chunk]))
                self.counts[kind, chunk] += 1

    def count(self, kind: TaskKind, chunk: int) -> int:
        """How many microbatches of this pass have been written down."""
        return self.counts[kind, chunk]

    def up_to(self, num_microbatches: int) -> list[Task]:
        """The order without the microbatches from this number on."""
        return [task for task in self.tasks if task.microbatch < num_microbatches]


def alternate(forwards: list[Task], backwards: list[Task], num_warmup: int) -> list[Task]:
    """The warm-up forwards, then forward and backward in turn, then the remaining backwards."""
    order = forwards[:num_warmup]
    rest = forwards[num_warmup:]
    for i, backward in enumerate(backwards):
        order += [*rest[i : i + 1], backward]
    return order
