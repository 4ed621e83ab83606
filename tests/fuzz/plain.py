"""The plain loop that compositions are compared with: one process, one device, the whole model, sums in float64.

It is written apart from the library: gradients are ``jax.grad`` of a whole microbatch, and sums, norms, clipping, keys
and skipped steps are worked out here, as the documents say. Of the library it uses only the functions of the chunks.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.schedules import Edge
from tests.fuzz.composition import Composition
from tests.fuzz.models import Microbatch, absent_pairs, microbatches, model_of


class Step(NamedTuple):
    """The results of a step."""

    loss: float
    weight: float
    norm: float
    skipped: bool
    means: dict[str, float]


def optimizer_of(composition: Composition) -> optax.GradientTransformation:
    """Returns the composition's optimizer by its name.

    Optimizers that divide by moments do so with a large epsilon: an update must not turn rounding into a step.
    """

    def labels(params: Any) -> Any:
        return {name: "slow" if name[-1] in "0d" else "fast" for name in params}

    def by_leaves(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / len(jax.tree.leaves(updates)), updates)

    warm_up = optax.warmup_cosine_decay_schedule(1e-3, 2e-2, 2, 5)
    made: dict[str, Any] = {
        "sgd": lambda: optax.sgd(0.1),
        "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
        "adamw": lambda: optax.adamw(1e-2, eps=1e-2, weight_decay=0.1),
        "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-2),
        "schedule": lambda: optax.adam(warm_up, eps=1e-2),
        "masked": lambda: optax.multi_transform({"slow": optax.sgd(0.01), "fast": optax.adam(1e-2, eps=1e-2)}, labels),
        "accumulate": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "muon": lambda: optax.contrib.muon(1e-2),
        "by-leaves": lambda: optax.chain(optax.stateless(by_leaves), optax.sgd(0.1)),
        "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    }
    return made[composition.optimizer]()


class PlainLoop:
    """Trains a composition's model from these parameters."""

    def __init__(self, composition: Composition, params: Mapping[str, Any]) -> None:
        self.composition = composition
        self._programs = programs_of(composition.setup)
        params = jax.tree.map(np.array, dict(params))
        still = self._programs.frozen
        self.frozen = {name: layer for name, layer in params.items() if name in still}
        self.trained = {name: layer for name, layer in params.items() if name not in still}
        self._state = self._programs.optimizer.init(self.trained)

    @property
    def params(self) -> dict[str, Any]:
        """All parameters by layer name."""
        return {**self.trained, **self.frozen}

    def step(self, number: int) -> Step:
        """Train on the batch of this step."""
        absent = absent_pairs(self.composition, number)
        loss = weight = 0.0
        sums: dict[str, float] = {}
        total = jax.tree.map(_zeros, self.trained)
        for place, microbatch in enumerate(microbatches(self.composition, number)):
            key = jax.random.key(np.uint32(self.composition.seed))
            key = jax.random.fold_in(jax.random.fold_in(key, np.uint32(number)), np.uint32(place))
            gone = tuple(chunk for chunk, m in absent if m == place)
            (own_loss, rest), grads = self._programs.gradient(self.trained, self.frozen, microbatch, key, gone)
            own_weight, *named = rest
            loss, weight = loss + float(own_loss), weight + float(own_weight)
            for name, value in named[0].items() if named else ():
                sums[name] = sums.get(name, 0.0) + float(value)
            total = jax.tree.map(lambda a, g: a + np.asarray(g).astype(a.dtype), total, grads)
        return self._update(loss, weight, sums, total)

    def _update(self, loss: float, weight: float, sums: dict[str, float], total: Any) -> Step:
        with np.errstate(all="ignore"):
            mean = jax.tree.map(lambda leaf: leaf / weight if weight else leaf * np.nan, total)
            norm = float(np.sqrt(sum(np.sum(np.abs(leaf) ** 2) for leaf in jax.tree.leaves(mean))))
            loss = loss / weight if weight else float("nan")
            if self.composition.clip is not None and not norm < self.composition.clip:
                mean = jax.tree.map(lambda leaf: leaf * (self.composition.clip / norm), mean)
        finite = bool(np.isfinite(loss) and np.isfinite(norm)) and weight > 0
        means = {name: value / weight if weight else float("nan") for name, value in sums.items()}
        if finite or not self.composition.skip_nonfinite:
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), mean, self.trained)
            self.trained, self._state = self._programs.update(self.trained, self._state, grads)
        return Step(loss, weight, norm, not finite and self.composition.skip_nonfinite, means)

    def evaluate(self, number: int) -> tuple[float, float]:
        """Returns loss sum and weight of a step's microbatches, with nothing random."""
        found = [
            self._programs.evaluate(self.trained, self.frozen, microbatch)
            for microbatch in microbatches(self.composition, number)
        ]
        return sum(float(loss) for loss, _ in found), sum(float(weight) for _, weight in found)


class _Programs(NamedTuple):
    """The compiled programs of a setup."""

    optimizer: optax.GradientTransformation
    frozen: frozenset[str]
    gradient: Any
    update: Any
    evaluate: Any


@lru_cache(maxsize=8)
def programs_of(setup: Composition) -> _Programs:
    model, optimizer = model_of(setup), optimizer_of(setup)
    layers = [list(jax.eval_shape(chunk.init, jax.random.key(0))) for chunk in model.plain]
    edges = [Edge(*pair) for pair in pairwise(range(len(layers)))] if model.edges is None else model.edges
    sources = [[edge for edge in edges if edge.target == number] for number in range(len(layers))]

    def run(trained: Any, frozen: Any, leaves: Microbatch, key: Any, gone: tuple[int, ...] = ()) -> Any:
        params, outputs = {**trained, **frozen}, dict[int, Any]()
        for number, chunk in enumerate(model.plain):
            inputs = [
                outputs.get(edge.source) if edge.carries_gradient else jax.lax.stop_gradient(outputs[edge.source])
                for edge in sources[number]
            ]
            lacks = not set(chunk.leaves) - chunk.optional_leaves <= set(leaves)
            if lacks or any(edge.source not in outputs and not edge.is_optional for edge in sources[number]):
                continue
            outputs[number] = chunk.apply(
                {name: params[name] for name in layers[number]},
                None if not inputs else inputs[0] if len(inputs) == 1 else tuple(inputs),
                {name: leaves[name] for name in chunk.leaves if name in leaves},
                key=key if chunk.uses_key else None,
            )
            if number in gone:
                outputs[number] = jax.tree.map(jnp.zeros_like, outputs[number])
        loss, *rest = outputs[len(layers) - 1]
        return loss, jax.lax.stop_gradient(rest)

    gradient = jax.jit(jax.value_and_grad(run, has_aux=True), static_argnums=4)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def evaluate(trained: Any, frozen: Any, leaves: Microbatch) -> Any:
        loss, (weight, *_) = run(trained, frozen, leaves, None)
        return loss, weight

    reached = {len(layers) - 1}
    for number in reversed(range(len(layers))):
        reached |= {edge.source for edge in sources[number] if edge.carries_gradient and number in reached}
    unreached = {n for c in range(len(layers)) if c not in reached for n in layers[c]}
    unreached -= {n for c in reached for n in layers[c]}
    return _Programs(optimizer, model.frozen | unreached, gradient, update, evaluate)


def _zeros(leaf: np.ndarray) -> np.ndarray:
    """Returns zeros to sum gradients in."""
    return np.zeros(leaf.shape, np.complex128 if np.iscomplexobj(leaf) else np.float64)
