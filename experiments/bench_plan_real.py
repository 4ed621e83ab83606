"""Compare plans with real training on this machine's cores: the forecast of a step, and of the memory of every stage.

A small language model is profiled under the launcher, in as many processes as it is then trained in, each on its own
share of the cores. The measured profile becomes a cut's costs, and the same order is simulated with them, or its memory
forecast; then the cut is trained in that order.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Order
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.planner.cost_file import read_costs
from rrfp_jax.schedules import looped
from rrfp_jax.simulation import simulate

MICROBATCH_SIZE = 2
MODEL = {"vocab_size": 512, "hidden": 192, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 512, "init_std": 0.02}
SMALL_MODEL = {"vocab_size": 256, "hidden": 32, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 64, "init_std": 0.05}
WARM_UP, FORECAST_STEPS = 3, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """Cut of the model, and an order in which its stages train it."""

    layers: tuple[int, ...]
    """Number of layers of each chunk."""
    num_stages: int
    num_microbatches: int
    order: Mapping[str, Any]
    """Order by the names of a configuration's section ``pipeline``."""

    @property
    def words(self) -> str:
        """Returns a description for a table's line."""
        told = " ".join(map(str, self.order.values()))
        return f"{'+'.join(map(str, self.layers))} layers, {told}"

    def cut(self, book: CostBook, *, remat: str = "none") -> CutModel:
        """Returns the chunks with the ends of the model, which are layers too."""
        counts = list(self.layers)
        counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
        return CutModel(
            costs=book.at(microbatch_size=MICROBATCH_SIZE, remat=remat),
            counts=tuple(counts),
            placement=looped(self.num_stages, len(counts) // self.num_stages),
            num_microbatches=self.num_microbatches,
            split=bool(self.resolved.graph.split),
        )

    @property
    def resolved(self) -> Order:
        """Returns the order as a run resolves it."""
        chunks = len(self.layers) // self.num_stages
        return OrderingOptions(**self.order).resolve(
            num_stages=self.num_stages, num_microbatches=self.num_microbatches, chunks_per_stage=chunks
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Measurements of a run."""

    step_ms: float
    """Median milliseconds of a step, without the first steps."""
    peaks: tuple[int, ...]
    """Largest memory that each stage has held in any step."""


def forecast_step_ms(case: Case, book: CostBook) -> float:
    """Returns the simulated interval between the ends of two steps, in the same order."""
    from rrfp_jax.runtime.options import UpdateRules

    cut = case.cut(book)
    arbiters = case.resolved.arbiters(UpdateRules(clip_norm=1.0).step_rules(1))
    simulated = simulate(arbiters, cut.simulated_costs(), machine=cut.machine, num_steps=FORECAST_STEPS)
    return median(simulated.step_ms[1:])


def forecast_peaks(case: Case, book: CostBook, *, remat: str = "none") -> list[int]:
    """Returns the forecast memory of every stage."""
    sizes = dict(enumerate(case.cut(book, remat=remat).chunk_bytes))
    return [stage.peak for stage in forecast_memory(case.resolved, sizes, case.num_microbatches)]


class Bench:
    """Bench that profiles and trains one model under the launcher, in a folder of its own."""

    def __init__(self, folder: Path, model: Mapping[str, Any], num_layers: int, *, length: int) -> None:
        self._folder, self._length = folder, length
        self._model = {**model, "num_layers": num_layers}

    def profile(self, num_processes: int, *, repeats: int, remats: Sequence[str] = ("none",)) -> CostBook:
        """Returns the measured costs."""
        path = self._config("profile", {"num_stages": num_processes}, num_microbatches=4, steps=1)
        out = self._folder / "costs.json"
        options = ["--repeats", str(repeats), "--remat", ",".join(remats), "--output", str(out)]
        self._launch(num_processes, "profile", ["--config", str(path), *options])
        return read_costs(out)

    def train(self, case: Case, steps: int, *, remat: str = "none") -> Trained:
        """Trains for so many steps that count."""
        cut = str(ChunkLayout(layers=case.layers))
        layout = {"num_stages": case.num_stages, "layout": cut, "remat": remat, **case.order}
        path = self._config("train", layout, num_microbatches=case.num_microbatches, steps=WARM_UP + steps)
        run = self._folder / "run"
        self._launch(case.num_stages, "train", ["--config", str(path), "--run-dir", str(run), "--fresh"])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        peaks = zip(*(row["peak_memory_bytes"] for row in rows), strict=True)
        return Trained(
            step_ms=median(row["step_time_s"] for row in rows[WARM_UP:]) * 1e3, peaks=tuple(max(each) for each in peaks)
        )

    def _config(self, name: str, layout: Mapping[str, Any], *, num_microbatches: int, steps: int) -> Path:
        path = self._folder / f"{name}.yaml"
        sections = {
            "model": self._model,
            "data": {
                "length": self._length,
                "batch_size": num_microbatches * MICROBATCH_SIZE,
                "num_microbatches": num_microbatches,
                "max_bytes": 2**20,
            },
            "pipeline": dict(layout),
            "cluster": {"progress_deadline_s": 120},
            "optimizer": {"learning_rate": 1e-3},
            "run": {"steps": steps, "platform": "cpu", "checkpoint_minutes": None},
        }
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return path

    def _launch(self, num_processes: int, command: str, options: Sequence[str]) -> None:
        words = [sys.executable, "-m", "experiments.launch", "--processes", str(num_processes), "--", command, *options]
        cache = {"RRFP_COMPILE_CACHE": str((self._folder / "programs").absolute())}
        ended = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | cache)
        if ended.returncode:
            raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr[-2000:]}")


@contextmanager
def bench_of(model: Mapping[str, Any], num_layers: int, *, length: int) -> Iterator[Bench]:
    """Yields a bench whose files are deleted at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Bench(Path(folder), model, num_layers, length=length)
