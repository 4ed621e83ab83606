"""Measurements beside torch's schedules: the draws that all sides meet, the turns they take, and the results.

In every block and for every sigma torch runs first, then our orders one after another. The durations of their steps are
drawn before, as an array; torch's stages are told them as numbers, ours and the simulator take the array itself.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.emulate import EMULATED_STEP
from experiments.turns import LineProcess, our_ranks, torch_processes
from rrfp_jax.commands.studies import Profile
from rrfp_jax.core import Order
from rrfp_jax.simulation import Costs, for_steps, lognormal, simulate
from rrfp_jax.simulation.costs import Durations

TORCH = "torch 1F1B"
THEIRS = {"1f1b": TORCH, "interleaved-1f1b": "torch interleaved 1F1B", "zb-v": "torch zero bubble V"}
"""Names of torch's schedules in rows, by the names of ours that they match."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Orders and sizes of the comparison."""

    num_stages: int
    num_microbatches: int
    durations_ms: Profile
    sigmas: tuple[float, ...]
    num_blocks: int
    num_steps: int
    """Number of steps of each turn, which is one order with one sigma in one block."""
    num_warm_up: int
    """Number of warm-up steps of each turn, before them."""
    seed: int
    orders: Mapping[str, Order]
    """Orders of ours by entry; all have as many chunks as :attr:`theirs`."""
    theirs: Order
    """Order of our table, strict, of the schedule that torch follows."""
    schedule: str = "1f1b"
    """Name of that schedule, a key of :data:`THEIRS`."""

    def draw(self, block: int, sigma: float) -> Durations:
        """Returns the durations of a turn, first without noise, to warm up; [steps, chunks, microbatches, 3]."""
        rng = np.random.default_rng([self.seed, block, self.sigmas.index(sigma)])
        num_chunks = self.theirs.placement.num_chunks
        of_chunk_ms = np.array(self.durations_ms, np.float64) * (self.num_stages / num_chunks)
        quiet_ms = np.broadcast_to(of_chunk_ms, (1, num_chunks, self.num_microbatches, 3))
        noisy_ms = lognormal(for_steps(quiet_ms, self.num_steps), sigma, rng)
        return np.concatenate([for_steps(quiet_ms, self.num_warm_up), noisy_ms])


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Results of one order in a block with the draws of a sigma."""

    sigma: float
    order: str
    step_ms: list[float]
    """Milliseconds of each step, without warm-up."""
    simulated_ms: list[float]
    """Milliseconds of the same steps in virtual time, without a host or messages to wait for."""
    in_flight: float
    """Most activations of a microbatch that a stage held."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one order under one sigma, over all blocks."""

    sigma: float
    order: str
    median_ms: float
    torch_over_this: float
    """Ratio of torch's median to this one."""
    simulated_ms: float
    """Median in virtual time."""
    in_flight: float


def measure(setting: Setting, torch_python: str, *, bind: str, ours: Sequence[str]) -> list[Turn]:
    """Measures all turns.

    Args:
        bind: as the launcher's option, for both sides.
        ours: the options of our ranks that make the setting's orders.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        torch_processes(
            torch_python, ("-m", "experiments.torch_stage", setting.schedule), setting.num_stages, bind=bind
        ) as members,
        our_ranks("experiments.bench_torch_ranks", setting.num_stages, *ours, bind=bind) as ranks,
    ):
        turns: list[Turn] = []
        for block in range(setting.num_blocks):
            for sigma in setting.sigmas:
                durations_ms = setting.draw(block, sigma)
                figures = _run_torch(members, setting, durations_ms, Path(folder, "D.json"))
                turns.append(_turn(setting, sigma, THEIRS[setting.schedule], durations_ms, figures))
                for order in setting.orders:
                    figures = _run_ours(ranks, order, durations_ms, Path(folder, "D.npy"))
                    turns.append(_turn(setting, sigma, order, durations_ms, figures))
        return turns


def rows_of(turns: Sequence[Turn]) -> list[Row]:
    """Returns, sigma by sigma, the medians of every order, torch's first."""
    groups: dict[tuple[float, str], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.sigma, turn.order), []).append(turn)
    torch = turns[0].order
    medians = {key: median(ms for turn in group for ms in turn.step_ms) for key, group in groups.items()}
    return [
        Row(
            sigma=sigma,
            order=order,
            median_ms=medians[sigma, order],
            torch_over_this=medians[sigma, torch] / medians[sigma, order],
            simulated_ms=median(ms for turn in group for ms in turn.simulated_ms),
            in_flight=max(turn.in_flight for turn in group),
        )
        for (sigma, order), group in groups.items()
    ]


def torch_durations(durations_ms: Durations) -> list[list[list[list[float]]]]:
    """Returns ``[chunk][step][microbatch]`` of F, I and W, as emulated stages have them; a whole backward is I + W."""
    by_chunk: list[list[list[list[float]]]] = durations_ms.swapaxes(0, 1).tolist()
    return by_chunk


def _run_torch(members: Sequence[LineProcess], setting: Setting, durations_ms: Durations, path: Path) -> dict[str, Any]:
    path.write_text(json.dumps(torch_durations(durations_ms)), encoding="ascii")
    for member in members:
        member.tell(str(path))
    step_ms, *_ = (json.loads(member.answer()) for member in members)
    assert setting.theirs.table is not None
    return {"step_ms": step_ms, "in_flight": max(setting.theirs.table.peak_activations())}


def _run_ours(ranks: LineProcess, order: str, durations_ms: Durations, path: Path) -> dict[str, Any]:
    np.save(path, durations_ms)
    ranks.tell(json.dumps({"order": order, "durations": str(path)}))
    figures: dict[str, Any] = json.loads(ranks.answer())
    return figures


def _turn(setting: Setting, sigma: float, order: str, durations_ms: Durations, figures: dict[str, Any]) -> Turn:
    arbiters = setting.orders.get(order, setting.theirs).arbiters(EMULATED_STEP)
    simulation = simulate(arbiters, Costs(durations_ms=durations_ms), num_steps=len(durations_ms))
    return Turn(
        sigma=sigma,
        order=order,
        step_ms=figures["step_ms"][setting.num_warm_up :],
        simulated_ms=simulation.step_ms[setting.num_warm_up :],
        in_flight=figures["in_flight"],
    )
