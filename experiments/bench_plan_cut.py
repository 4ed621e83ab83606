"""Gain of a planned cut in the real runtime, beside its forecast.

A language model whose vocabulary weighs as much as several layers. Two stages train in two processes, each on cores of
its own: the model is profiled in the same way, then the even cut and ``layout: auto`` train in turn. Four and
eight emulated stages take the durations of both cuts as they are. Medians over all steps but the first ones.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import yaml
from rich.console import Console

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.core import Order, Ordering, StepRules
from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cost_file import read_costs
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear
from rrfp_jax.simulation import simulate
from rrfp_jax.testing import emulate

_ROOT = Path(__file__).parents[1]
_ROUNDS, _STEPS, _WARM_UP = 3, 12, 3
_EMULATED_STAGES, _EMULATED_STEPS, _MICROBATCHES = (4, 8), 8, 16
_STAGES, _SIZE, _PARTS = 2, 4, 8
"""Sizes of the trained model: stages, samples of a microbatch, and microbatches."""
_MODEL = {
    "model": {"vocab_size": 16384, "hidden": 128, "num_layers": 16, "num_heads": 4, "mlp_dim": 384},
    "data": {"path": None, "length": 64, "batch_size": _SIZE * _PARTS, "num_microbatches": _PARTS},
    "pipeline": {"num_stages": _STAGES, "schedule": "1f1b", "consume": "strict"},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"steps": _STEPS, "platform": "cpu", "checkpoint_minutes": None},
}


@dataclass(frozen=True)
class Gain:
    """Gain of the best cut over the even one, as forecast and as measured."""

    what: str
    even: tuple[int, ...]
    best: tuple[int, ...]
    even_ms: float
    best_ms: float
    forecast: float
    """Forecast speed relative to the even cut."""

    @property
    def measured(self) -> float:
        return self.even_ms / self.best_ms


def auto_cut(console: Console) -> list[Gain]:
    """Prints and returns the gain of the best cut over the even one."""
    use_cpu(max(_EMULATED_STAGES))
    gains = [_trained(), *(_emulated(stages) for stages in _EMULATED_STAGES)]
    table = make_table("even cut and layout: auto", "stages", "even", "auto")
    for heading in ("even ms", "auto ms", "forecast", "measured", "points apart"):
        table.add_column(heading, justify="right")
    for gain in gains:
        told = (f"{gain.even_ms:.1f}", f"{gain.best_ms:.1f}", f"{gain.forecast:.3f}", f"{gain.measured:.3f}")
        cuts = (",".join(map(str, counts)) for counts in (gain.even, gain.best))
        table.add_row(gain.what, *cuts, *told, f"{abs(gain.forecast - gain.measured) * 100:.1f}")
    console.print(table)
    return gains


def _trained() -> Gain:
    """Trains both cuts in turn, in two processes on cores of their own."""
    with TemporaryDirectory() as folder:
        config, costs = Path(folder, "model.yaml"), Path(folder, "costs.json")
        config.write_text(yaml.safe_dump(_MODEL), encoding="utf-8")
        _launched("profile", "--config", config, "--output", costs)
        measured = read_costs(costs).at(microbatch_size=_SIZE)
        layers = _layers(best_cut(measured, linear(_STAGES), _PARTS, split=False))
        best = ChunkLayout(layers=layers)
        found: dict[str, list[float]] = {"even": [], "auto": []}
        for number in range(_ROUNDS):
            for name in found:
                words = ("--layout", best) if name == "auto" else ()
                run = Path(folder, f"{name}-{number}")
                _launched("train", "--config", config, *words, "--run-dir", run)
                found[name] += _step_ms(run)[_WARM_UP:]
        return _gain_of(measured, layers, found)


def _gain_of(costs: ModelCosts, best: tuple[int, ...], found: dict[str, list[float]]) -> Gain:
    """Returns the gain with the forecasts of both cuts by these costs."""
    even = even_cut(costs, linear(_STAGES), _PARTS, split=False)
    first, last = best
    auto = CutModel(
        costs=costs, counts=(first + 1, last + 1), placement=linear(_STAGES), num_microbatches=_PARTS, split=False
    )
    return Gain(
        what=f"{_STAGES}, trained",
        even=_layers(even),
        best=best,
        even_ms=median(found["even"]),
        best_ms=median(found["auto"]),
        forecast=_forecast_ms(even) / _forecast_ms(auto),
    )


def _emulated(stages: int) -> Gain:
    """Runs both cuts on stages that sleep as long as their chunks take."""
    layer = LayerCosts(forward_ms=3.0, input_gradient_ms=3.3, weight_gradient_ms=2.7)
    head = LayerCosts(forward_ms=10.0, input_gradient_ms=10.0, weight_gradient_ms=10.0)
    embedding = LayerCosts(forward_ms=0.3, input_gradient_ms=0.0, weight_gradient_ms=0.6)
    costs = ModelCosts(
        layers=("embedding", *["layer"] * (6 * stages), "head"),
        types={"layer": layer, "head": head, "embedding": embedding},
    )
    even, best = (make(costs, linear(stages), _MICROBATCHES, split=False) for make in (even_cut, best_cut))
    found: dict[str, list[float]] = {"even": [], "best": []}
    for _ in range(_ROUNDS):
        for name, cut in (("even", even), ("best", best)):
            found[name] += _emulated_ms(cut)
    return Gain(
        what=f"{stages}, emulated",
        even=_layers(even),
        best=_layers(best),
        even_ms=median(found["even"]),
        best_ms=median(found["best"]),
        forecast=_forecast_ms(even) / _forecast_ms(best),
    )


def _emulated_ms(cut: CutModel) -> list[float]:
    durations_ms = np.repeat(cut.durations_ms, _EMULATED_STEPS, axis=0)
    return emulate(_order(cut).arbiters(EMULATED_STEP), durations_ms, _EMULATED_STEPS).step_ms[1:]


def _forecast_ms(cut: CutModel) -> float:
    """Returns the milliseconds of the second of two simulated steps, R and U included."""
    arbiters = _order(cut).arbiters(StepRules())
    return simulate(arbiters, cut.simulated_costs(), machine=cut.machine, num_steps=2).step_ms[-1]


def _order(cut: CutModel) -> Order:
    """Returns the order of strict 1F1B for a cut."""
    request = ScheduleRequest(num_stages=cut.placement.num_stages, num_microbatches=cut.num_microbatches)
    table = build_schedule("1f1b", request)
    return Ordering(schedule=table, consume="strict").resolve(cut.placement, cut.graph)


def _layers(cut: CutModel) -> tuple[int, ...]:
    """Returns the number of layers of each chunk, without embedding and head."""
    counts = np.array(cut.counts)
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts.tolist())


def _step_ms(run: Path) -> list[float]:
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [1e3 * float(json.loads(row)["step_time_s"]) for row in rows]


def _launched(command: str, *arguments: object) -> None:
    """Runs a command of ours in a process for each stage, each on its share of the cores."""
    launcher = (sys.executable, "-m", "experiments.launch", "--processes", str(_STAGES), "--")
    ended = subprocess.run(
        [*launcher, f"experiments.{command}", *map(str, arguments)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{command} ended with code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
