"""What a group of processes trains: the cases of ``programs/trainer.py``, and the results that it leaves."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.layout import Layout
from rrfp_jax.schedules import Placement, linear, looped
from tests.multiprocess.launching import launched

_FILE = "cases.json"
_PATIENCE_S = 1500.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    name: str
    model: str = "plain"
    """See :mod:`tests.multiprocess.models`."""
    num_stages: int
    cut: tuple[float, ...] = ()
    """Layers of each chunk."""
    num_shards: int = 0
    """Of the vocabulary; 0: embedding and head are in the first and the last chunk."""
    stage_of_chunk: tuple[int, ...] = ()
    """Where the chunks of a model that is no chain lie."""
    slices: int = 1
    """In which sequences run through each chunk."""
    frozen: tuple[str, ...] = ()
    """Patterns of layers that never change."""
    data: int = 1
    tensor: int = 1
    mesh: dict[str, int] | list[dict[str, int]] = field(default_factory=dict)
    """Innermost first, of all stages or of each; empty: tensor alone."""
    num_ranks: int
    replicas: tuple[int, ...] = ()
    """Of each stage, where some have fewer than ``data``."""
    order: tuple[int, ...] = ()
    """The order in which units take devices; empty: by number."""
    transport: str = "sockets"
    num_steps: int = 10
    left_out: tuple[tuple[int, int], ...] = ()
    """Pairs of a chunk and a microbatch whose weight gradient every step leaves out."""
    num_rows: int = 2
    """Of a microbatch of a language model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the pipeline; a schedule by its name."""
    delay_ms: float = 0.0
    """By which every task is held up."""

    @property
    def layout(self) -> Layout:
        names = ("data", "tensor", "mesh", "order", "replicas")
        degrees: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Layout(num_stages=self.num_stages, num_ranks=self.num_ranks, **degrees)

    @property
    def placement(self) -> Placement:
        if self.stage_of_chunk:
            return Placement(self.stage_of_chunk)
        num_chunks = max(len(self.cut), self.num_stages)
        whole = (
            linear(self.num_stages)
            if num_chunks == self.num_stages
            else looped(self.num_stages, num_chunks // self.num_stages)
        )
        return Placement(tuple(stage for stage in whole.stage_of_chunk for _ in range(self.slices)))

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def read_cases(folder: Path) -> list[Case]:
    """The cases of a folder."""
    cases = json.loads((folder / _FILE).read_text())
    tuples = ("cut", "frozen", "stage_of_chunk", "order", "replicas", "left_out")
    return [Case(**{**case, **{name: tuple(case[name]) for name in tuples}}) for case in cases]


def result_file(folder: Path, case: Case, rank: int) -> Path:
    """Where a rank writes what it got."""
    return folder / f"{case.name}.{rank}.pickle"


def train_together(cases: Sequence[Case], folder: Path, *options: str) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """Losses and final parameters by case, all trained by one group of processes; options are the trainer's.

    Checks that every rank has the same losses, and that all copies of a parameter are equal bit for bit.
    """
    (folder / _FILE).write_text(json.dumps([case.as_dict() for case in cases]))
    with launched("--processes", cases[0].num_ranks, "--", "trainer", folder, *options) as launcher:
        assert launcher.wait(_PATIENCE_S) == 0, launcher.text
    return {case.name: _result(folder, case) for case in cases}


def _result(folder: Path, case: Case) -> tuple[list[float], dict[str, Any]]:
    results = [pickle.loads(result_file(folder, case, rank).read_bytes()) for rank in range(case.num_ranks)]
    losses = results[0][0]
    assert all(other == losses for other, _ in results), case.name
    whole: dict[tuple[str, ...], np.ndarray] = {}
    known: dict[tuple[str, ...], np.ndarray] = {}
    for _, chunks in results:
        for chunk in chunks:
            for path, (shape, shards) in chunk.items():
                for bounds, values in shards:
                    place = tuple(slice(*each) for each in bounds)
                    array = whole.setdefault(path, np.zeros(shape, values.dtype))
                    is_known = known.setdefault(path, np.zeros(shape, bool))
                    np.testing.assert_array_equal(array[place][is_known[place]], values[is_known[place]], str(path))
                    array[place], is_known[place] = values, True
    assert all(each.all() for each in known.values()), case.name
    return losses, _tree(whole)


def _tree(leaves: dict[tuple[str, ...], np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
