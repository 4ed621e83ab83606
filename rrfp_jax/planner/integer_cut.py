"""The best cut as an integer program for HiGHS: how many layers of each run lie before each bound.

A *run* is a row of layers of one type. With ``u[c, r]`` layers of run r before bound c, and ``d[c, r]`` whether run
r + 1 has begun before it (and run r is complete), all that a stage does and holds is linear: its work, and its memory
with one more number for each chunk (the bytes of a microbatch there) and for each stage (its largest temporaries). So
models of few runs make small programs, however many layers they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from rrfp_jax.planner.cut_problem import ADDED, ADDED_FIRST, Cuts, Floats, LayerCutProblem

_Terms = dict[int, float]
"""A sum of variables times numbers; the number under :data:`_ONE` is a constant."""
_ONE = -1
_LESS = 1e-5
"""Relative distance below which times count as alike: HiGHS keeps to limits but for a tenth of it."""


def solve(
    problem: LayerCutProblem, *, below_ms: float, at_least_ms: float, most_nodes: int
) -> tuple[Cuts | None, bool]:
    """Returns the best cut [1, chunks + 1] whose stages all take less than ``below_ms``, and whether it is proven.

    ``below_ms`` may be infinite. None: there is no such cut, or none was found within the nodes of the search.
    """
    program = _Program(problem)
    result = program.minimised(below_ms * (1 - _LESS) / program.scale_ms, at_least_ms / program.scale_ms, most_nodes)
    if result.x is None:
        return None, result.status == 2
    return program.bounds(result.x), result.status == 0


@dataclass
class _Program:
    problem: LayerCutProblem
    uppers: list[float] = field(default_factory=list)
    are_integer: list[bool] = field(default_factory=list)
    rows: list[tuple[_Terms, float]] = field(default_factory=list)
    """Constraints: sums that are at most a number."""

    def __post_init__(self) -> None:
        self.scale_ms = float(self.problem.layer_work_ms[0].sum()) / self.problem.placement.num_stages or 1.0
        self.chunks, self.runs = self.problem.placement.num_chunks, self.problem.runs
        sizes = [stop - first for first, stop in self.runs]
        inner = range(1, self.chunks)
        self.u = {(c, r): self._variable(size) for c in inner for r, size in enumerate(sizes)}
        self.d = {(c, r): self._variable(1) for c in inner for r in range(len(sizes) - 1)}
        self.largest = self._variable(np.inf, is_integer=False)
        self._order(sizes)
        self._work()
        if self.problem.has_limits:
            self._memory(sizes)

    def minimised(self, below: float, at_least: float, most_nodes: int) -> OptimizeResult:
        """Returns the solver's answer for a fullest stage between two times, in parts of ``scale_ms``."""
        lowers = np.zeros(len(self.uppers))
        uppers = np.array(self.uppers)
        lowers[self.largest], uppers[self.largest] = min(at_least, below), below
        entries = [(row, name, value) for row, (terms, _) in enumerate(self.rows) for name, value in terms.items()]
        places = [(row, name) for row, name, _ in entries]
        matrix = coo_array(
            ([value for *_, value in entries], tuple(np.array(places).T)), shape=(len(self.rows), len(uppers))
        )
        wanted = np.zeros(len(uppers))
        wanted[self.largest] = 1.0
        return milp(
            wanted,
            constraints=LinearConstraint(matrix.tocsr(), ub=np.array([most for _, most in self.rows])),
            integrality=np.array(self.are_integer, dtype=int),
            bounds=Bounds(lowers, uppers),
            # presolving takes longer than it spares here, and may print
            options={"mip_rel_gap": 0.1 * _LESS, "node_limit": most_nodes, "presolve": False},
        )

    def bounds(self, values: Floats) -> Cuts:
        """Returns the cut of a solution."""
        inner = [sum(round(values[self.u[c, r]]) for r in range(len(self.runs))) for c in range(1, self.chunks)]
        return np.array([[0, *inner, self.problem.costs.num_layers]])

    def _variable(self, upper: float, *, is_integer: bool = True) -> int:
        self.uppers.append(upper)
        self.are_integer.append(is_integer)
        return len(self.uppers) - 1

    def _at_most(self, terms: _Terms, most: float = 0.0) -> None:
        most -= terms.pop(_ONE, 0.0)
        self.rows.append((terms, most))

    def _before(self, c: int, r: int) -> _Terms:
        """Returns the number of layers of run r before bound c."""
        if c == 0:
            return {}
        first, stop = self.runs[r]
        return {_ONE: float(stop - first)} if c == self.chunks else {self.u[c, r]: 1.0}

    def _begun(self, c: int, r: int) -> _Terms:
        """Returns whether run r has begun before bound c, which is never the first."""
        if r == 0 or (c == self.chunks and r < len(self.runs)):
            return {_ONE: 1.0}
        return {} if r == len(self.runs) else {self.d[c, r - 1]: 1.0}

    def _held(self, chunk: int, values: Floats) -> _Terms:
        """Returns the sum of ``values`` over the layers of a chunk."""
        terms: _Terms = {}
        for r, (first, _) in enumerate(self.runs):
            _add(terms, self._before(chunk + 1, r), values[first])
            _add(terms, self._before(chunk, r), -values[first])
        return terms

    def _order(self, sizes: list[int]) -> None:
        ends = {r for r, (_, stop) in enumerate(self.runs) if stop - 1 in self.problem.costs.ends}
        ones = np.ones(self.problem.costs.num_layers)
        for chunk in range(self.chunks):
            self._at_most(_add({}, self._held(chunk, ones), -1.0), -1.0)
            for r in range(len(sizes)):
                self._at_most(_add(self._before(chunk, r), self._before(chunk + 1, r), -1.0))
            for r in ends - {len(sizes) - 1}:
                # a chunk that begins a run behind an end starts no earlier than at that end
                self._at_most(_add(_add({}, self._begun(chunk + 1, r + 1), sizes[r]), self._before(chunk, r), -1.0))
        for (c, r), begun in self.d.items():
            self._at_most({begun: float(sizes[r]), self.u[c, r]: -1.0})
            self._at_most({self.u[c, r + 1]: 1.0, begun: -float(sizes[r + 1])})
            self._at_most({begun: 1.0, self.u[c, r + 1]: -1.0})

    def _work(self) -> None:
        work, overhead = self.problem.layer_work_ms / self.scale_ms, self.problem.overhead_ms / self.scale_ms
        for stage, chunks in enumerate(self.problem.placement.chunks_of_stage):
            terms: _Terms = {self.largest: -1.0, _ONE: len(chunks) * overhead}
            for chunk in chunks:
                _add(terms, self._held(chunk, work[self.problem.kinds[stage]]))
            self._at_most(terms)

    def _memory(self, sizes: list[int]) -> None:
        """Adds the limits of memory, in parts of each stage's limit."""
        problem = self.problem
        assert problem.memory is not None
        self._completion(sizes)
        for stage, chunks in enumerate(problem.placement.chunks_of_stage):
            limit = problem.limits[stage]
            if not np.isfinite(limit):
                continue
            arrays = problem.bytes_of_chunks[problem.kinds[stage]]
            values = {name: each / limit for name, each in arrays.per_layer.items()}
            peak = self._variable(np.inf, is_integer=False)
            in_flight = [self._in_flight(chunk, values) for chunk in chunks]
            lasting: _Terms = {peak: 1.0}
            for chunk in chunks:
                _add(lasting, self._held(chunk, values["fixed_bytes"]))
                self._peak(chunk, sizes, values, peak)
            for part in problem.memory.waiting(problem.placement, stage, problem.num_microbatches):
                _add(lasting, self._waiting(chunks, part, values["output_bytes"]))
            for held in problem.memory.allocations(problem.placement, stage, problem.num_microbatches):
                terms = dict(lasting)
                for each, number in zip(in_flight, held, strict=True):
                    _add(terms, {each: number})
                self._at_most(terms, 1.0)

    def _completion(self, sizes: list[int]) -> None:
        """Adds variables that say whether run r is complete before a bound, also where the next run has not begun."""
        self.complete = {(c, r): self._variable(1) for c, r in self.d}
        for (c, r), complete in self.complete.items():
            self._at_most({complete: float(sizes[r]), self.u[c, r]: -1.0})
            self._at_most({self.u[c, r]: 1.0, complete: -1.0}, sizes[r] - 1.0)

    def _waiting(self, chunks: Sequence[int], part: list[tuple[float, ...]], values: Floats) -> _Terms:
        """Returns the bytes that wait for chunks: the only allocation, or a variable at least as large as each of
        them."""
        found: list[_Terms] = []
        for numbers in part:
            terms: _Terms = {}
            for chunk, number in zip(chunks, numbers, strict=True):
                _add(terms, self._behind(chunk, values), number)
            found.append(terms)
        if len(found) == 1:
            return found[0]
        most = self._variable(np.inf, is_integer=False)
        for terms in found:
            self._at_most(_add(terms, {most: -1.0}))
        return {most: 1.0}

    def _in_flight(self, chunk: int, values: dict[str, Floats]) -> int:
        """Returns a variable: the bytes that a microbatch takes in flight beyond those that it takes while it waits."""
        more = self._variable(np.inf, is_integer=False)
        stash = _add(self._held(chunk, values["stash_bytes"]), self._ahead(chunk, values["kept_bytes"]))
        alternatives = [stash]
        if self.problem.split and chunk == 0 and self.chunks > 1:  # see CutModel.chunk_bytes
            alternatives.append(_add(dict(stash), self._behind(1, values["output_bytes"])))
        elif self.problem.split:
            alternatives.append(self._held(chunk, values["owed_bytes"]))
        for each in alternatives:
            terms = _add(_add({more: -1.0}, each), self._behind(chunk + 1, values["output_bytes"]))
            self._at_most(_add(terms, self._behind(chunk, values["output_bytes"]), -1.0))
        return more

    def _peak(self, chunk: int, sizes: list[int], values: dict[str, Floats], peak: int) -> None:
        """Bounds ``peak`` by the temporaries of each run in the chunk, and by the array that crosses either of its
        bounds."""
        for r, (first, _) in enumerate(self.runs):
            holds = self._variable(1)
            own = _add(self._before(chunk + 1, r), self._before(chunk, r), -1.0)
            self._at_most(_add(own, {holds: -float(sizes[r])}))
            for bound in (chunk, chunk + 1):
                terms = _add({peak: -1.0}, {holds: values["temporaries_bytes"][first]})
                _add(terms, self._held(chunk, values[ADDED_FIRST if chunk == 0 else ADDED]))
                self._at_most(_add(terms, self._behind(bound, values["output_bytes"])))

    def _behind(self, c: int, values: Floats) -> _Terms:
        """Returns the value of the last layer before a bound; nothing at the ends of the model."""
        terms: _Terms = {}
        if 0 < c < self.chunks:
            for r, (first, _) in enumerate(self.runs):
                _add(terms, self._begun(c, r), values[first])
                _add(terms, self._begun(c, r + 1), -values[first])
        return terms

    def _ahead(self, c: int, values: Floats) -> _Terms:
        """Returns the value of the first layer behind a bound, which is not the last."""
        if c == 0:
            return {_ONE: values[0]}
        terms: _Terms = {_ONE: values[0]}
        for r in range(len(self.runs) - 1):
            _add(terms, {self.complete[c, r]: values[self.runs[r + 1][0]] - values[self.runs[r][0]]})
        return terms


def _add(terms: _Terms, more: _Terms, times: float = 1.0) -> _Terms:
    for name, value in more.items():
        terms[name] = terms.get(name, 0.0) + times * value
    return terms
