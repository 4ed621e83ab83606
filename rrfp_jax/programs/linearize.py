"""Cut the differentiation of a function into a forward and a backward program, and say what must be kept in between.

``jax.vjp`` is traced once. What its pullback remembers (its residuals) falls into four groups:

* values that are at hand anyway when the backward runs: parameters, operands (inputs, batch leaves, random counters)
  and outputs. They are read again where they are; nothing is copied. Only operands and outputs that a residual is equal
  to are kept.
* values computed from parameters and constants alone, such as a transposed weight. The backward computes them again:
  otherwise every microbatch in flight would hold its own copy of the same numbers.
* constants, which become part of the program;
* all others: the stash, each value once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from rrfp_jax.programs.specs import Specs, is_inexact


class Origin(Enum):
    """Where the backward finds a residual."""

    PARAM = auto()
    KEPT = auto()
    DERIVED = auto()
    CONSTANT = auto()
    STASH = auto()


class Residual(NamedTuple):
    """One value that the pullback remembers: its origin and its place there."""

    origin: Origin
    place: Any


@dataclass(frozen=True, kw_only=True)
class Linearization:
    """A differentiated function in two halves; every field is fixed when the function has been traced.

    The function is ``apply(params, operands) -> outputs``. Only the ``operands`` leaves that were chosen, and all
    parameters, are differentiated.
    """

    forward: Callable[[Any, Any], tuple[Any, tuple[jax.Array, ...]]]
    """``forward(params, operands) -> (outputs, stash)``."""
    backward: Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, list[jax.Array]]]
    """``backward(params, kept, stash, output_grads) -> (params_grads, operand_grads)``, over flat lists: gradients of
    the differentiated output leaves in, gradients of the chosen operand leaves out."""
    kept: tuple[int, ...]
    """Which leaves of ``(operands, outputs)``, flattened, the backward reads again."""
    stash: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and dtypes of the stash."""


def linearize(
    apply: Callable[[Any, Any], Any],
    params: Specs,
    operands: Specs,
    *,
    operand_leaves: Sequence[int],
    output_leaves: Sequence[int],
) -> Linearization:
    """Trace ``apply`` and its pullback once, on shapes.

    ``operand_leaves`` and ``output_leaves`` are the places, among the flattened operands and outputs, of the leaves to
    differentiate with respect to and of the leaves whose gradient comes in; all of them must be floating.
    """
    trees: dict[str, Any] = {}

    def traced(params: Any, operands: Any) -> tuple[list[Any], list[Any]]:
        leaves, operands_tree = jax.tree.flatten(operands)

        def primal(params: Any, chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            merged = list(leaves)
            for place, value in zip(operand_leaves, chosen, strict=True):
                merged[place] = value
            outputs, trees["outputs"] = jax.tree.flatten(apply(params, jax.tree.unflatten(operands_tree, merged)))
            return [outputs[place] for place in output_leaves], outputs

        _, pullback, outputs = jax.vjp(primal, params, [leaves[place] for place in operand_leaves], has_aux=True)
        residuals, trees["pullback"] = jax.tree.flatten(pullback)
        return outputs, residuals

    closed = jax.make_jaxpr(traced)(params, operands)
    num_outputs = trees["outputs"].num_leaves
    cut = _Cut(closed, len(jax.tree.leaves(params)), num_outputs)
    run = jex.jaxpr_as_fun(_with_outputs(closed, [*closed.jaxpr.outvars[:num_outputs], *cut.stash]))

    def forward(params: Any, operands: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        results = run(*jax.tree.leaves(params), *jax.tree.leaves(operands))
        return jax.tree.unflatten(trees["outputs"], results[:num_outputs]), tuple(results[num_outputs:])

    def backward(
        params: Any, kept: Sequence[Any], stash: Sequence[Any], output_grads: Sequence[Any]
    ) -> tuple[Any, list[jax.Array]]:
        residuals = cut.gather(jax.tree.leaves(params), kept, stash)
        pullback = jax.tree.unflatten(trees["pullback"], residuals)
        params_grads, operand_grads = pullback(list(output_grads))
        return params_grads, operand_grads

    stash = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in cut.stash)
    return Linearization(forward=forward, backward=backward, kept=tuple(cut.kept), stash=stash)


def inexact_places(tree: Specs, offset: int = 0) -> list[int]:
    """The places of the floating leaves of a tree that starts at place ``offset`` of a flat list."""
    return [offset + place for place, leaf in enumerate(jax.tree.leaves(tree)) if is_inexact(leaf)]


class _Cut:
    """The residuals of a traced function, sorted by origin."""

    def __init__(self, closed: jex.ClosedJaxpr, num_params: int, num_outputs: int) -> None:
        self.closed = closed
        self.num_params = num_params
        self.kept: list[int] = []
        self.stash: list[Any] = []
        self.derived: list[Any] = []
        jaxpr = closed.jaxpr
        self._params = {var: place for place, var in enumerate(jaxpr.invars[:num_params])}
        at_hand = [*jaxpr.invars[num_params:], *jaxpr.outvars[:num_outputs]]
        self._at_hand = {v: place for place, v in reversed(list(enumerate(at_hand))) if not isinstance(v, jex.Literal)}
        self._from_params = _variables_from_params(jaxpr, num_params)
        self.residuals = [self._classify(atom) for atom in jaxpr.outvars[num_outputs:]]

    def _classify(self, atom: Any) -> Residual:
        if isinstance(atom, jex.Literal):
            return Residual(Origin.CONSTANT, _literal(atom))
        if atom in self._params:
            return Residual(Origin.PARAM, self._params[atom])
        if atom in self._from_params:
            return Residual(Origin.DERIVED, _place(self.derived, atom))
        if atom in self._at_hand:
            return Residual(Origin.KEPT, _place(self.kept, self._at_hand[atom]))
        return Residual(Origin.STASH, _place(self.stash, atom))

    def gather(self, params: Sequence[Any], kept: Sequence[Any], stash: Sequence[Any]) -> list[Any]:
        """The residuals in the pullback's order."""
        jaxpr = self.closed.jaxpr
        eqns = [eqn for eqn in jaxpr.eqns if any(var in self._from_params for var in eqn.outvars)]
        sliced = jaxpr.replace(
            invars=jaxpr.invars[: self.num_params], outvars=self.derived, eqns=eqns, effects=jex.no_effects
        )
        derived = jex.jaxpr_as_fun(jex.ClosedJaxpr(sliced, self.closed.consts))(*params)
        sources: dict[Origin, Sequence[Any]] = {
            Origin.PARAM: params,
            Origin.KEPT: kept,
            Origin.DERIVED: derived,
            Origin.STASH: stash,
        }
        return [r.place if r.origin is Origin.CONSTANT else sources[r.origin][r.place] for r in self.residuals]


def _variables_from_params(jaxpr: jex.Jaxpr, num_params: int) -> set[Any]:
    """Constants and everything computed from parameters and constants alone, without side effects or callbacks."""
    known: set[Any] = {*jaxpr.constvars, *jaxpr.invars[:num_params]}
    for eqn in jaxpr.eqns:
        if _repeatable(eqn) and all(isinstance(atom, jex.Literal) or atom in known for atom in eqn.invars):
            known.update(eqn.outvars)
    return known - set(jaxpr.invars[:num_params])


def _repeatable(eqn: jex.JaxprEqn) -> bool:
    """Whether running an equation once more goes unnoticed: no side effect and no call back to the host."""
    if eqn.effects or "callback" in eqn.primitive.name:
        return False
    return all(_repeatable(inner) for body in jex.jaxprs_in_params(eqn.params) for inner in body.eqns)


def _with_outputs(closed: jex.ClosedJaxpr, outvars: list[Any]) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)


def _literal(atom: Any) -> Any:
    return np.asarray(atom.val, atom.aval.dtype)


def _place(found: list[Any], item: Any) -> int:
    """The place of ``item`` in ``found``, added at the end if it is new."""
    if item not in found:
        found.append(item)
    return found.index(item)
