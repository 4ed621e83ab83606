"""One stage of torch's own 1F1B schedule on gloo, whose tasks last as long as they are told: a program beside ours.

``python -m experiments.torch_stage RANK NUM_STAGES PORT``, by an interpreter that has torch, once for every stage. Each
line that comes in names a JSON file of milliseconds, ``[stage][step][microbatch]`` being F and backward; all ranks run
its steps and answer with a line, the milliseconds that each took there. Those of rank 0 are the steps': it starts each
of them first and ends it last, for its last backward needs those of all other stages.

Modules, autograd, shapes and messages are torch's own. A stage's forward or backward has a small array to compute on,
and then sleeps until its duration has passed since the schedule called for it, so that what torch does within the call
is part of the duration, as a launch of a program is in our emulated stages.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rrfp_jax.runtime.sleeping import Sleeper

_NUM_ITEMS = 8
"""Of a microbatch of what travels: 32 bytes, as between our emulated stages."""
_PATIENCE = timedelta(seconds=60)

_Step = list[list[float]]
"""For every microbatch the milliseconds of F and backward."""


class _Chunk(torch.nn.Module):
    """A parameter, so that every stage has a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, value: Any) -> Any:
        return value * self.weight


class _TimedStage(PipelineStage):
    """A stage whose forwards and backwards take given durations; without them, only what torch needs."""

    durations_ms: _Step | None = None
    num_tasks = 0
    """How many have taken their duration."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sleeper = Sleeper()

    def forward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> Any:
        return self._lasting(0, super().forward_one_chunk, microbatch, *args, **options)

    def backward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> Any:
        return self._lasting(1, super().backward_one_chunk, microbatch, *args, **options)

    def _lasting(self, kind: int, call: Any, microbatch: int, *args: Any, **options: Any) -> Any:
        begun_s = time.perf_counter()
        result = call(microbatch, *args, **options)
        if self.durations_ms is not None:
            if duration_ms := self.durations_ms[microbatch][kind]:
                self._sleeper.until(begun_s + duration_ms * 1e-3)
            self.num_tasks += 1
        return result


class _Pipeline:
    """This rank's stage, and the schedule on it."""

    def __init__(self, rank: int, num_stages: int, num_microbatches: int) -> None:
        self._chunk = _Chunk()
        self.stage = _TimedStage(self._chunk, rank, num_stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(self.stage, num_microbatches, loss_fn=lambda output, _: output.sum())
        batch = torch.ones(num_microbatches, _NUM_ITEMS)
        self._inputs = (batch,) if rank == 0 else ()
        self._target = {"target": batch} if rank == num_stages - 1 else {}

    def step(self, durations_ms: _Step | None) -> None:
        self.stage.durations_ms, self.stage.num_tasks = durations_ms, 0
        self._schedule.step(*self._inputs, **self._target)
        self._chunk.weight.grad = None
        if durations_ms is not None and self.stage.num_tasks != 2 * len(durations_ms):
            raise RuntimeError(f"torch {torch.__version__} calls stages otherwise than this program knows")


def main(rank: int, num_stages: int, port: int) -> None:
    """Obey the lines that come in."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_stages, timeout=_PATIENCE
    )
    pipeline = None
    for line in sys.stdin:
        steps: list[_Step] = json.loads(Path(line.rstrip("\n")).read_text(encoding="ascii"))[rank]
        pipeline = pipeline or _Pipeline(rank, num_stages, len(steps[0]))
        pipeline.step(None)  # torch finds out about shapes and opens connections
        dist.barrier()
        ends_s = [time.perf_counter()]
        for step in steps:
            pipeline.step(step)
            ends_s.append(time.perf_counter())
        dist.barrier()
        print(json.dumps([(end_s - start_s) * 1e3 for start_s, end_s in pairwise(ends_s)]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
