"""Rank of torch that trains :mod:`experiments.small_model`, by its own 1F1B on gloo, or rank 0 alone in a plain loop.

``python -m experiments.torch_model RANK NUM_RANKS PORT``, by an interpreter that has torch. Each line that comes in is
JSON: ``way`` (``pipeline`` or ``loop``), ``microbatches``, ``steps`` and ``seed``. Every rank starts from the same
parameters again and answers with a line: the milliseconds of its steps, and, where it computes them, the losses.
"""

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from experiments.small_model import LEARNING_RATE, STAGES, batch, weights

_PATIENCE = timedelta(seconds=60)


class _Stage(torch.nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(one)) for one in weights(stage)])

    def forward(self, value: Any) -> Any:
        for one in self.weights:
            value = value + torch.tanh(value @ one)
        return value


def _loop(inputs: Any, targets: Any, steps: int) -> dict[str, list[float]]:
    """Trains on one device, microbatch by microbatch."""
    model = torch.nn.Sequential(*[_Stage(stage) for stage in range(STAGES)])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    step_ms, losses = [], []
    for _ in range(steps):
        begun_s = time.perf_counter()
        total = 0.0
        for value, target in zip(inputs, targets, strict=True):
            loss = torch.nn.functional.mse_loss(model(value), target) / len(inputs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        step_ms.append((time.perf_counter() - begun_s) * 1e3)
    return {"step_ms": step_ms, "losses": losses}


def _pipeline(rank: int, inputs: Any, targets: Any, steps: int) -> dict[str, list[float]]:
    """Trains this rank's stage of torch's 1F1B, whose gradients are means over microbatches."""
    module = _Stage(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(inputs), loss_fn=torch.nn.functional.mse_loss)
    given = (inputs.flatten(0, 1),) if rank == 0 else ()
    is_last = rank == STAGES - 1
    step_ms, losses = [], []
    dist.barrier()
    for _ in range(steps):
        begun_s = time.perf_counter()
        of_microbatches: list[Any] = []
        wanted = {"target": targets.flatten(0, 1), "losses": of_microbatches} if is_last else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        step_ms.append((time.perf_counter() - begun_s) * 1e3)
        if is_last:
            losses.append(torch.stack(of_microbatches).mean().item())
    dist.barrier()
    return {"step_ms": step_ms, "losses": losses}


def main(rank: int, num_ranks: int, port: int) -> None:
    """Obeys the lines that come in."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks, timeout=_PATIENCE
    )
    for line in sys.stdin:
        told = json.loads(line)
        inputs, targets = map(torch.tensor, batch(told["microbatches"], told["seed"]))
        if told["way"] == "pipeline":
            found = _pipeline(rank, inputs, targets, told["steps"])
        else:
            found = _loop(inputs, targets, told["steps"]) if rank == 0 else {"step_ms": [], "losses": []}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
