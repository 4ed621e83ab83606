"""Zero bubble's automatic schedule, from profiled times and a memory limit (Qi et al., arXiv 2401.10241, section 3).

The heuristic builds all stages together, one microbatch's F and I per round:

1. warm-up: as many F as memory allows before the first I arrives (*eager*: also one that delays it);
2. rounds: every stage runs an F, unless it is more than one ahead of the next stage and the F would delay the next I
   (*patient*), then every stage runs an I. Before each, W fill the wait: those that fit whole; one that does not fit if
   the wait would become the largest cumulative bubble of all stages (*greedy*: always); and those that must make room;
3. the remaining W.

A stage always runs at least as many F as its successor. The best of the eight settings of the three flags is taken.
"""

import math
from functools import lru_cache
from itertools import product

from rrfp_jax.schedules.language import Stage, TaskOrder, given
from rrfp_jax.schedules.registry import schedule
from rrfp_jax.schedules.request import ONE_EACH, ScheduleRequest
from rrfp_jax.schedules.tasks import Task, TaskKind

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters
_ROUNDING = 1e-9


@schedule(
    "zb-auto",
    shape=ONE_EACH,
    source="Zero Bubble, arXiv 2401.10241, section 3",
    split_backward=True,
    from_times=True,
    constraints="memory_limit at least 1; give the profiled durations_ms and comm_ms",
)
def zb_auto(s: Stage) -> TaskOrder:
    """The heuristic's best order for ``durations_ms``, ``comm_ms``, ``memory_limit`` (2 p without a word).

    The times are those of a whole stage, the limit counts activations of one microbatch there. From p up every unit of
    memory shortens the step until the bubble is gone; below p the loss is large, and V-Half or V-Min do better.
    Raises ValueError for a memory limit below one microbatch.
    """
    return given(_best(s.asked)[s.i])


@lru_cache(maxsize=8)
def _best(request: ScheduleRequest) -> list[list[Task]]:
    """Returns the orders of all stages by the best setting."""
    limit = 2.0 * request.num_stages if request.memory_limit is None else request.memory_limit
    if limit < 1:
        raise ValueError(f"memory_limit {limit} does not hold a single microbatch: give at least 1")
    runs = (_Heuristic(request, limit, *flags) for flags in product((True, False), repeat=3))
    # The cost is the longest stage, from first start to last end.
    return min(runs, key=lambda run: max(end - begin for begin, end in zip(run.begin, run.end, strict=True))).orders


class _Heuristic:
    """One run: per stage the order so far, its end, its bubble since the first F, and the memory held."""

    def __init__(self, request: ScheduleRequest, limit: float, eager: bool, patient: bool, greedy: bool) -> None:
        self.p, self.m = request.num_stages, request.num_microbatches
        self.times = dict(zip((F, I, W), request.durations_ms, strict=True))
        self.comm, self.limit = request.comm_ms, limit
        self.eager, self.patient, self.greedy = eager, patient, greedy
        self.memory = {F: 1.0, I: -request.input_gradient_frees, W: request.input_gradient_frees - 1.0}
        self.orders: list[list[Task]] = [[] for _ in range(self.p)]
        self.count = [{F: 0, I: 0, W: 0} for _ in range(self.p)]
        self.end = [0.0] * self.p
        self.begin = [0.0] * self.p
        self.bubble = [0.0] * self.p
        self.held = [0.0] * self.p
        self.ends: dict[Task, float] = {}
        self._warm_up()
        for _ in range(1, self.m):
            self._round()
        for stage in range(self.p):
            while self._pending(stage):
                self._put(stage, W)

    def _warm_up(self) -> None:
        for stage in range(self.p):
            self._put(stage, F)
        # How many more F fit on each stage before its first I, worked out from the last stage backwards.
        extra = [0] * self.p
        arrival = self.end[-1] + self.times[I]
        for stage in reversed(range(self.p - 1)):
            end, arrival = self.end[stage], arrival + self.comm
            slack = self.times[F] if self.eager else 0.0
            while (
                extra[stage] + 1 < self.m
                and self.held[stage] + extra[stage] + 1 <= self.limit
                and end + self.times[F] <= arrival + slack + _ROUNDING
            ):
                extra[stage] += 1
                end += self.times[F]
            arrival = max(end, arrival) + self.times[I]
        for stage in range(self.p):
            if stage > 0:
                extra[stage] = min(extra[stage], max(0, extra[stage - 1] - 1))
            for _ in range(extra[stage]):
                self._put(stage, F)
        for stage in reversed(range(self.p)):
            self._put(stage, I)

    def _round(self) -> None:
        run = [self._wants_forward(stage) for stage in range(self.p)]
        for stage in reversed(range(self.p - 1)):
            run[stage] = run[stage] and (run[stage + 1] or self.count[stage + 1][F] == self.m)
        for stage in range(self.p):
            if run[stage]:
                while self.held[stage] + 1 > self.limit + _ROUNDING:
                    self._put(stage, W)
                self._fill(stage, self._arrival(stage, F))
                self._put(stage, F)
        for stage in reversed(range(self.p)):
            if stage == 0 and self.count[0][F] == self.m:
                while self._pending(0):  # nobody waits for the first stage's I
                    self._put(0, W)
            self._fill(stage, self._arrival(stage, I))
            self._put(stage, I)

    def _wants_forward(self, stage: int) -> bool:
        done = self.count[stage][F]
        if done == self.m:
            return False
        if not self.patient or stage == self.p - 1 or done < self.count[stage + 1][F] + 2:
            return True
        next_input_gradient = self.end[stage + 1] + self.times[F] + self.times[I] + self.comm
        wait = next_input_gradient - self.end[stage]
        # W that must run before the memory holds another F are in the way too.
        excess = self.held[stage] + 1 - self.limit
        num_weights = math.ceil(excess / -self.memory[W] - _ROUNDING) if excess > _ROUNDING else 0
        if self.times[F] + num_weights * self.times[W] <= wait:
            return True
        return wait > max(self.bubble) - self.bubble[stage]

    def _fill(self, stage: int, arrival: float) -> None:
        """Runs W while the stage waits for its next input."""
        while self._pending(stage) and self.end[stage] + self.times[W] <= arrival + _ROUNDING:
            self._put(stage, W)
        wait = arrival - self.end[stage]
        worst = self.greedy or wait > max(self.bubble) - self.bubble[stage]
        if worst and wait > _ROUNDING and self._pending(stage):
            self._put(stage, W)

    def _pending(self, stage: int) -> bool:
        return self.count[stage][W] < self.count[stage][I]

    def _arrival(self, stage: int, kind: TaskKind) -> float:
        """Returns the time at which the input of the stage's next F or I is there."""
        neighbour = stage - 1 if kind is F else stage + 1
        needed = Task(kind, neighbour, self.count[stage][kind])
        return self.ends[needed] + self.comm if 0 <= neighbour < self.p else 0.0

    def _put(self, stage: int, kind: TaskKind) -> None:
        task = Task(kind, stage, self.count[stage][kind])
        start = self.end[stage]
        if kind is not W:
            start = max(start, self._arrival(stage, kind))
        if self.orders[stage]:
            self.bubble[stage] += start - self.end[stage]
        else:
            self.begin[stage] = start
        self.end[stage] = self.ends[task] = start + self.times[kind]
        self.held[stage] += self.memory[kind]
        self.count[stage][kind] += 1
        self.orders[stage].append(task)
