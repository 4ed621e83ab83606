"""Rank of one of torch's own schedules on gloo, whose tasks last for given durations: a program beside ours.

``python -m experiments.torch_stage SCHEDULE RANK NUM_RANKS PORT``, by an interpreter that has torch, once for every
rank. SCHEDULE is a name of ours: ``1f1b``, ``interleaved-1f1b`` or ``zb-v``; the last two have two chunks on a rank,
which torch calls stages. Each line that comes in names a JSON file of milliseconds, ``[chunk][step][microbatch]`` being
F, I and W; all ranks run its steps and answer with a line, the milliseconds that each took there. Those of rank 0 are
the steps': it starts each of them first and ends it last, for its last backward needs those of all other ranks.

Modules, autograd, shapes and messages are torch's own. A stage's forward or backward has a small array to compute on,
and then sleeps until its duration has passed since the schedule called for it, so that torch's work within the call is
part of the duration, as a launch of a program is in our emulated stages.
"""

import json
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from rrfp_jax.runtime.sleeping import Sleeper

_NUM_ITEMS = 8
"""Number of items that travel per microbatch: 32 bytes, as between our emulated stages."""
_PATIENCE = timedelta(seconds=60)

_Step = list[list[float]]
"""Milliseconds of F, I and W for every microbatch."""


class _Chunk(torch.nn.Module):
    """Chunk with one parameter, so that every stage has a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, value: Any) -> Any:
        return value * self.weight


class _TimedStage(PipelineStage):
    """Chunk whose forwards and backwards take given durations; without them, only the time that torch needs."""

    durations_ms: _Step | None = None
    num_tasks = 0
    """Number of tasks that have taken their duration."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sleeper = Sleeper()

    def forward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> Any:
        return self._lasting((0,), super().forward_one_chunk, microbatch, *args, **options)

    def backward_one_chunk(self, microbatch: int, *args: Any, full_backward: bool = True, **options: Any) -> Any:
        parts = (1, 2) if full_backward else (1,)
        call = super().backward_one_chunk
        return self._lasting(parts, call, microbatch, *args, full_backward=full_backward, **options)

    def backward_weight_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> Any:
        return self._lasting((2,), super().backward_weight_one_chunk, microbatch, *args, **options)

    def _lasting(self, parts: tuple[int, ...], call: Any, microbatch: int, *args: Any, **options: Any) -> Any:
        begun_s = time.perf_counter()
        result = call(microbatch, *args, **options)
        if self.durations_ms is not None:
            if duration_ms := sum(self.durations_ms[microbatch][part] for part in parts):
                self._sleeper.until(begun_s + duration_ms * 1e-3)
            self.num_tasks += 1
        return result


_TASKS = {"1f1b": 2, "interleaved-1f1b": 2, "zb-v": 3}
"""Number of tasks of each microbatch on a chunk, by schedule."""


def _chunks(schedule: str, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Returns the chunks of a rank."""
    second = {"1f1b": (), "interleaved-1f1b": (num_ranks + rank,), "zb-v": (2 * num_ranks - 1 - rank,)}
    return (rank, *second[schedule])


class _Pipeline:
    """This rank's chunks, and the schedule on them."""

    def __init__(self, schedule: str, rank: int, num_ranks: int, num_microbatches: int) -> None:
        chunks = _chunks(schedule, rank, num_ranks)
        num_chunks = num_ranks * len(chunks)
        self._modules = [_Chunk() for _ in chunks]
        self.stages = {
            chunk: _TimedStage(module, chunk, num_chunks, torch.device("cpu"))
            for chunk, module in zip(chunks, self._modules, strict=True)
        }
        self._num_tasks = _TASKS[schedule] * num_microbatches
        stages, loss = list(self.stages.values()), _loss
        self._schedule: Any
        if schedule == "1f1b":
            self._schedule = Schedule1F1B(stages[0], num_microbatches, loss_fn=loss)
        elif schedule == "interleaved-1f1b":
            self._schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=loss)
        else:
            self._schedule = ScheduleZBVZeroBubble(stages, num_microbatches, loss_fn=loss)
        batch = torch.ones(num_microbatches, _NUM_ITEMS)
        self._inputs = (batch,) if 0 in chunks else ()
        self._target = {"target": batch} if num_chunks - 1 in chunks else {}

    def step(self, durations_ms: list[_Step] | None) -> None:
        """Runs a step with the durations of each chunk."""
        for chunk, stage in self.stages.items():
            stage.durations_ms, stage.num_tasks = None if durations_ms is None else durations_ms[chunk], 0
        self._schedule.step(*self._inputs, **self._target)
        for module in self._modules:
            module.weight.grad = None
        if durations_ms is not None and any(stage.num_tasks != self._num_tasks for stage in self.stages.values()):
            raise RuntimeError(f"torch {torch.__version__} calls stages otherwise than this program knows")


def _loss(output: Any, _: Any) -> Any:
    return output.sum()


def main(schedule: str, rank: int, num_ranks: int, port: int) -> None:
    """Obeys the lines that come in."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks, timeout=_PATIENCE
    )
    pipeline = None
    for line in sys.stdin:
        by_chunk: list[list[_Step]] = json.loads(Path(line.rstrip("\n")).read_text(encoding="ascii"))
        pipeline = pipeline or _Pipeline(schedule, rank, num_ranks, len(by_chunk[0][0]))
        pipeline.step(None)  # torch finds out about shapes and opens connections
        dist.barrier()
        ends_s = [time.perf_counter()]
        for step in zip(*by_chunk, strict=True):
            pipeline.step(list(step))
            ends_s.append(time.perf_counter())
        dist.barrier()
        print(json.dumps([(end_s - start_s) * 1e3 for start_s, end_s in pairwise(ends_s)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
