"""How many microbatches a stage may hold, and why this bound can never deadlock.

Rule
----
A stage *holds* a microbatch from the start of its first F there to the end of its last task there with that microbatch
(B, or W where the backward is split). An F of a microbatch that the stage does not hold yet is admitted only if

1. a slot is free, and
2. afterwards the stage's *oldest unfinished* microbatch holds a slot, or one is still free.

All other tasks, an F of a held microbatch included, are never restrained.

Why no deadlock, for any positive window per stage, any placement, graph and hint
--------------------------------------------------------------------------------
Order all tasks of a step: first by microbatch; within one microbatch the F in topological order of the chunks, then the
B or I in reverse topological order, each W after its I. Every dependency goes from a smaller to a larger task in this
order, those that accumulation in microbatch order adds included. Consider the smallest task T that has not finished,
and let m be its microbatch and s its stage. All its predecessors are smaller, so they have finished: T is ready (or
running, or its inputs are under way and will arrive). Every smaller microbatch has finished everywhere, so m is the
oldest unfinished microbatch of s. If T is not an F, or if s holds m, T is admissible. Otherwise T is the F that would
start holding m. By induction over the admitted forwards a slot is free: whenever one was admitted, either the oldest
unfinished microbatch held a slot afterwards, or a slot stayed free; when the oldest finishes, its slot becomes free,
and holds for the next oldest or stays free. As m, the oldest, holds none, a slot is free; admitting m satisfies
condition 2 as well. So in every state with work left some task is ready and admissible or on its way, and since each
task runs once, the step ends. Hints only choose among admissible tasks, so none can break this.

Where microbatches differ in size, a step may say what each of them weighs on the stage, and the stage's *capacity*
bounds what is held together, in bytes for example. The rule is then that of :mod:`rrfp_jax.core.reserve`, in
which m is admitted if it fits, and if every older unfinished microbatch that is not held would still fit beside all
that is held and younger than itself; equal weights make it the rule above. The argument stays, but that no microbatch
may weigh more than the capacity: m, the oldest unfinished one, finds nothing held that is older, and the younger ones
leave room for it.

Counting forwards minus backwards instead (as appendix C of the RRFP paper does for BF) lacks condition 2: with general
hints, unequal windows or a graph, younger microbatches can take every slot that the oldest needs.
"""

from collections.abc import Sequence


class Window:
    """One stage's held microbatches under the rule above; ``limit`` None switches the restraint off.

    ``tasks_per_microbatch`` counts the stage's tasks of each of its microbatches, whose numbers begin at ``first``.
    """

    __slots__ = ("first", "held", "left", "limit", "oldest")

    def __init__(self, limit: int | None, tasks_per_microbatch: tuple[int, ...], first: int = 0) -> None:
        self.limit, self.first = limit, first
        self.left = list(tasks_per_microbatch)
        self.held: set[int] = set()
        self.oldest = first
        self._advance()

    def copy(self) -> "Window":
        twin = object.__new__(type(self))
        twin.limit, twin.first, twin.oldest = self.limit, self.first, self.oldest
        twin.left, twin.held = self.left.copy(), self.held.copy()
        return twin

    @property
    def is_full(self) -> bool:
        """Whether nothing is admitted that is not held."""
        return self.limit is not None and len(self.held) >= self.limit

    def free(self) -> int | None:
        """How many slots are free; None without a limit."""
        return None if self.limit is None else self.limit - len(self.held)

    def admits(self, microbatch: int) -> bool:
        """Whether an F of ``microbatch`` may start now."""
        if self.limit is None or microbatch in self.held:
            return True
        free = self.limit - len(self.held)
        return free > 1 or (free == 1 and (microbatch == self.oldest or self.oldest in self.held))

    def start_forward(self, microbatch: int) -> None:
        self.held.add(microbatch)

    def finish(self, microbatch: int) -> None:
        """One of the stage's tasks with this microbatch has finished."""
        place = microbatch - self.first
        self.left[place] -= 1
        if not self.left[place]:
            self.held.discard(microbatch)
            if microbatch == self.oldest:
                self._advance()

    def _advance(self) -> None:
        left, place = self.left, self.oldest - self.first
        while place < len(left) and not left[place]:
            place += 1
        self.oldest = self.first + place


def check_weights(weights: Sequence[int], num_microbatches: int, capacity: int | None, stage: int) -> None:
    """Raise ValueError for weights that a stage cannot take; ``capacity`` None: it counts microbatches."""
    if capacity is None:
        raise ValueError(f"stage {stage} is given weights of microbatches and no capacity: it counts them")
    if len(weights) != num_microbatches:
        raise ValueError(f"stage {stage} has {num_microbatches} microbatches and is given {len(weights)} weights")
    if min(weights, default=0) < 0:
        raise ValueError(f"stage {stage} is given a negative weight of a microbatch, {min(weights)}")
    if max(weights, default=0) > capacity:
        raise ValueError(
            f"a microbatch weighs {max(weights)} on stage {stage}, which may hold {capacity}: give at least that as "
            "window, or make microbatches smaller"
        )


def check_windows(window: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """One window per stage from one number or one per stage; raises ValueError with the remedy."""
    windows = tuple(map(int, window)) if isinstance(window, Sequence) else (int(window),) * num_stages
    if len(windows) != num_stages:
        raise ValueError(
            f"window has {len(windows)} numbers for {num_stages} stages: give one number, or one for each stage"
        )
    if min(windows) < 1:
        raise ValueError(
            f"window is {min(windows)}: a stage must be allowed to hold at least 1 microbatch, or it can never run"
        )
    return windows
