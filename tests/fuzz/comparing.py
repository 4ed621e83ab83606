"""Compare a pipeline's results with those of the plain loop."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.composition import RAW, Composition
from tests.fuzz.models import is_exact
from tests.fuzz.plain import Step


class Difference(Exception):
    """The pipeline gave another result than the plain loop."""


def _tolerances(composition: Composition) -> tuple[float, float, float]:
    """Returns relative tolerances: of losses and norms, of how far parameters move, and of parameters themselves.

    Sums of some thousand float32 terms are exact to about 1e-6 of their largest part, and gradients of microbatches
    cancel each other in part. Where values are rounded to bfloat16 on the way, a term that lies between two of its
    numbers may go either way, by 2**-8.
    """
    if not is_exact(composition):
        return 5e-3, 5e-2, 2e-3
    return (2e-5, 2e-3, 2e-6) if composition.optimizer == "muon" else (2e-5, 2e-4, 1e-6)


def _close(value: float, expected: float, rtol: float, others: Iterable[float] = (), *, atol: float = 1e-7) -> bool:
    spread = max((gap for other in others if np.isfinite(gap := abs(other - expected))), default=0.0)
    return bool(np.isclose(value, expected, rtol=rtol, atol=atol + spread, equal_nan=True))


def compare_step(composition: Composition, number: int, result: Any, step: Step, others: Sequence[Step] = ()) -> None:
    """Raise Difference for a step that differs from the plain loop's by more than rounding, and than ``others`` do."""
    rtol = _tolerances(composition)[0]
    if result.skipped != step.skipped:
        raise Difference(f"skipped of step {number} is {result.skipped}, of the plain loop {step.skipped}")
    if not _close(result.weight, step.weight, 1e-6):
        raise Difference(f"weight of step {number} is {result.weight}, of the plain loop {step.weight}")
    if not _close(result.loss, step.loss, rtol, [other.loss for other in others]):
        raise Difference(f"loss of step {number} is {result.loss}, of the plain loop {step.loss}")
    norms = [other.norm for other in others]
    if result.grad_norm is not None and not _close(result.grad_norm, step.norm, rtol, norms):
        raise Difference(f"norm of step {number} is {result.grad_norm}, of the plain loop {step.norm}")
    for name, mean in step.means.items():
        if not _close(result.means[name], mean, 10 * rtol, [other.means[name] for other in others], atol=1e-5):
            raise Difference(f"mean {name!r} of step {number} is {result.means[name]}, of the plain loop {mean}")


def compare_evaluation(composition: Composition, result: Any, expected: tuple[float, float]) -> None:
    for name, value, plain in zip(("loss_sum", "weight"), (result.loss_sum, result.weight), expected, strict=True):
        if not _close(value, plain, _tolerances(composition)[0]):
            raise Difference(f"{name} of the evaluation is {value}, of the plain loop {plain}")


def compare(composition: Composition, start: Any, params: Any, expected: Any, others: Sequence[Any] = ()) -> None:
    """Raise Difference for an array that is too far off, by the norm of its movement and by its own norm.

    It may be as far off as the same array of any of ``others``.
    """
    _, of_moved, of_size = _tolerances(composition)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise Difference(
            f"parameters are {jax.tree.structure(params)}, of the plain loop {jax.tree.structure(expected)}"
        )
    leaves = [map(_wide, jax.tree.leaves(tree)) for tree in (start, params, expected, *others)]
    for name, first, value, plain, *rounded in zip(names, *leaves, strict=True):
        if np.array_equal(value, plain, equal_nan=True):
            continue
        distance = np.linalg.norm(value - plain)
        allowed = of_moved * np.linalg.norm(plain - first) + of_size * np.linalg.norm(plain)
        allowed += max((np.linalg.norm(other - plain) for other in rounded), default=0.0)
        if not distance <= allowed:
            raise Difference(
                f"parameter {name} differs by {distance:.3g} from the plain loop's, which moved by "
                f"{np.linalg.norm(plain - first):.3g}; {allowed:.3g} is allowed"
            )


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64).ravel()


def rounded(params: Any, seed: int) -> Any:
    """Returns the parameters with each number moved to its next one, up or down at random."""
    rng = np.random.default_rng(seed)

    def moved(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        step = float(jnp.finfo(array.dtype).eps) * rng.choice((-1, 1), array.shape)
        wide = np.complex128 if np.iscomplexobj(array) else np.float64
        return (array.astype(wide) * (1 + step)).astype(array.dtype)

    return jax.tree.map(moved, params)


def check_start(composition: Composition, params: Any) -> None:
    """Raise Difference if layers that draw their values from the key alone start equal."""
    drawn = {name: _wide(layer["w"]) for name, layer in params.items() if name.startswith("layers") and "w" in layer}
    for name, value in drawn.items():
        for other, beside in drawn.items():
            if composition.model == RAW and name < other and np.array_equal(value, beside):
                raise Difference(f"layers {name!r} and {other!r} start with equal values")


def compare_bits(losses: list[list[float]], params: list[Any]) -> None:
    """Raise Difference if two deterministic runs in different orders do not give the same bits."""
    if not np.array_equal(*losses, equal_nan=True):
        raise Difference(f"losses {losses[0]} of a deterministic run are {losses[1]} in another order")
    for (path, one), two in zip(jax.tree.leaves_with_path(params[0]), jax.tree.leaves(params[1]), strict=True):
        if not np.array_equal(_wide(one), _wide(two), equal_nan=True):
            raise Difference(f"parameter {jax.tree_util.keystr(path)} of a deterministic run differs in another order")
