"""A function and its pullback as two jaxprs that share their residuals.

`jax.vjp` returns the pullback as a pytree whose leaves are the residuals. So the forward is traced as
(parameters, inputs) -> (outputs, residuals) and the backward as (residuals, cotangents) -> gradients. Only inexact
leaves are differentiated, and of these only those that are asked for: integers, booleans and random keys are
parameters or inputs without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Spec = jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class Structure:
    """A pytree's shape: how to flatten a tree like it, and what its leaves are."""

    name: str
    treedef: Any
    specs: tuple[Spec, ...]
    paths: tuple[str, ...]
    differentiable: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, tree: Any, wanted: Any = True) -> Structure:
        """`wanted`, a boolean or a tree of them that is a prefix of `tree`, may deny inexact leaves their gradient."""
        leaves, treedef = jax.tree.flatten(tree)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
        specs = tuple(map(_spec, leaves))
        choice = jax.tree.leaves(jax.tree.broadcast(wanted, tree))
        mask = tuple(
            bool(chosen) and jnp.issubdtype(spec.dtype, jnp.inexact) for chosen, spec in zip(choice, specs, strict=True)
        )
        return cls(name, treedef, specs, paths, mask)

    def flatten(self, tree: Any) -> list[Any]:
        """The leaves of `tree`; raises `ValueError` if it is not what the function was split for."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"{self.name} have the structure {treedef}, but the function was split for {self.treedef}: "
                f"split it again for these {self.name}"
            )
        for leaf, spec, path in zip(leaves, self.specs, self.paths, strict=True):
            _check(f"{self.name}{path}", leaf, spec)
        return leaves

    def flatten_gradient(self, tree: Any) -> list[Any]:
        """The leaves of a gradient for the differentiable leaves; the others may be None or anything."""
        leaves = self.treedef.flatten_up_to(tree)
        picked = []
        for leaf, spec, path, wanted in zip(leaves, self.specs, self.paths, self.differentiable, strict=True):
            if wanted:
                _check(f"gradient of {self.name}{path}", leaf, spec)
                picked.append(leaf)
        return picked

    def unflatten_gradient(self, gradients: Sequence[Any]) -> Any:
        """The gradient as a tree of this structure, with None in place of leaves that have none."""
        rest = iter(gradients)
        return jax.tree.unflatten(self.treedef, [next(rest) if wanted else None for wanted in self.differentiable])


def _spec(leaf: Any) -> Spec:
    if isinstance(leaf, Spec):
        return leaf
    aval = jax.typeof(leaf)
    sharding = getattr(leaf, "sharding", None)
    placed = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    return Spec(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=placed)


def _check(name: str, leaf: Any, spec: Spec) -> None:
    if jnp.shape(leaf) != spec.shape or jnp.result_type(leaf) != spec.dtype:
        raise ValueError(
            f"{name} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}, but the function was split for "
            f"{spec.dtype}{list(spec.shape)}: split it again for these shapes"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """Forward: [*params, *inputs] -> [*outputs, *residuals]. Backward: [*residuals, *cotangents] -> gradients of the
    differentiable leaves, [*params, *inputs]."""

    forward: Any
    backward: Any
    params: Structure
    inputs: Structure
    outputs: Structure


def trace(
    fn: Callable[[Any, Any], Any], params: Any, inputs: Any, param_gradients: Any = True, input_gradients: Any = True
) -> Traced:
    params_structure = Structure.of("params", params, param_gradients)
    inputs_structure = Structure.of("inputs", inputs, input_gradients)
    masks = (params_structure.differentiable, inputs_structure.differentiable)

    def run(params_leaves: Sequence[Any], inputs_leaves: Sequence[Any]) -> tuple[Any, Any]:
        picked = [_pick(leaves, mask) for leaves, mask in zip((params_leaves, inputs_leaves), masks, strict=True)]

        def differentiable(params_picked: Sequence[Any], inputs_picked: Sequence[Any]) -> Any:
            merged_params = _merge(params_leaves, params_picked, masks[0])
            merged_inputs = _merge(inputs_leaves, inputs_picked, masks[1])
            return fn(
                jax.tree.unflatten(params_structure.treedef, merged_params),
                jax.tree.unflatten(inputs_structure.treedef, merged_inputs),
            )

        return jax.vjp(differentiable, *picked)

    forward, (outputs, pullback) = jax.make_jaxpr(run, return_shape=True)(
        list(params_structure.specs), list(inputs_structure.specs)
    )
    outputs_structure = Structure.of("outputs", outputs)
    residuals, treedef = jax.tree.flatten(pullback)

    def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        rest = iter(cotangents)
        leaves = [
            next(rest) if wanted else np.zeros(spec.shape, jax.dtypes.float0)
            for spec, wanted in zip(outputs_structure.specs, outputs_structure.differentiable, strict=True)
        ]
        return jax.tree.unflatten(treedef, residuals)(jax.tree.unflatten(outputs_structure.treedef, leaves))

    cotangents = _pick(outputs_structure.specs, outputs_structure.differentiable)
    backward = jax.make_jaxpr(pull)(residuals, cotangents)
    return Traced(
        forward=forward, backward=backward, params=params_structure, inputs=inputs_structure, outputs=outputs_structure
    )


def _pick(leaves: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, wanted in zip(leaves, mask, strict=True) if wanted]


def _merge(leaves: Sequence[Any], picked: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    rest = iter(picked)
    return [next(rest) if wanted else leaf for leaf, wanted in zip(leaves, mask, strict=True)]
