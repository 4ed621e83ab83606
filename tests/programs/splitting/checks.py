"""Comparison of a split with `jax.vjp` of the same function, used by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.splitting import SplitBackward, split_backward
from tests.programs.splitting.zoo import Example


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for programs that run once: compiling is most of the time of these tests."""
    return jax.jit(
        function, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    )


def output_gradient(outputs: Any) -> Any:
    """A cotangent for every inexact leaf, None for the others."""
    leaves, treedef = jax.tree.flatten(outputs)
    draw = np.random.default_rng(7)
    gradients = [
        jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
        for leaf in leaves
    ]
    return treedef.unflatten(gradients)


def reference(example: Example, output_grad: Any) -> tuple[Any, Any, Any]:
    """(outputs, input gradient, parameter gradient) by jax.vjp, None for leaves that are not inexact."""
    outputs, pullback = jax.vjp(example.fn, example.params, example.inputs)
    leaves, treedef = jax.tree.flatten(outputs)
    given = treedef.flatten_up_to(output_grad)
    cotangents = [
        np.zeros(leaf.shape, jax.dtypes.float0) if gradient is None else gradient
        for leaf, gradient in zip(leaves, given, strict=True)
    ]
    params_grad, inputs_grad = pullback(treedef.unflatten(cotangents))
    clean = lambda tree: jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, tree)  # noqa: E731
    return outputs, clean(inputs_grad), clean(params_grad)


def run_split(split: SplitBackward, example: Example, output_grad: Any, *, prepared: bool) -> tuple[Any, Any, Any]:
    derived = split.prepare(example.params) if prepared else None
    outputs, residuals = split.forward(example.params, example.inputs, derived=derived)
    inputs_grad, weight_residuals = split.backward(example.params, residuals, output_grad, derived=derived)
    return outputs, inputs_grad, split.weight_gradient(example.params, weight_residuals, derived=derived)


def _norm(array: Any) -> float:
    return float(np.linalg.norm(np.asarray(array, float)))


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Same structure and types, and each leaf within `tolerance` of its norm; of the largest, if it is about zero."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(expected)
    assert jax.tree.structure(actual) == treedef
    norms = [_norm(leaf) for _, leaf in paths]
    floor = 1e-3 * max(norms, default=0.0)
    for (path, want), norm, got in zip(paths, norms, jax.tree.leaves(actual), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), jax.tree_util.keystr(path)
        error = _norm(np.asarray(got, float) - np.asarray(want, float))
        assert error <= tolerance * max(norm, floor), (jax.tree_util.keystr(path), error, norm)


def check_split(example: Example, tolerance: float, *, prepared: bool = False) -> SplitBackward:
    """Splits the example, compares all results with jax.vjp and returns the split.

    All functions run in one program: compiling several would take most of the time.
    """
    split = split_backward(example.fn, example.params, example.inputs)
    output_grad = output_gradient(jax.eval_shape(example.fn, example.params, example.inputs))

    @quick_jit
    def both(params: Any, inputs: Any, output_grad: Any) -> tuple[Any, Any]:
        given = example._replace(params=params, inputs=inputs)
        return run_split(split, given, output_grad, prepared=prepared), reference(given, output_grad)

    assert_close(*both(example.params, example.inputs, output_grad), tolerance)
    return split
