"""Rank of ours that trains :mod:`experiments.small_model` in the runtime, or rank 0 alone in a jitted loop.

Started through the launcher, one process for a stage. Every line of the file ``--turns`` is a JSON object: ``way``, an
entry of ``--compare`` or ``loop``, ``microbatches``, ``steps`` and ``seed``. Rank 0 answers with a line of JSON.
"""

import json
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from experiments.bench_torch_ranks import add_size_arguments, resolve_entries, turns
from experiments.small_model import LEARNING_RATE, STAGES, batch, weights
from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.simulate import parse_entries
from rrfp_jax.schedules import linear

if TYPE_CHECKING:
    from rrfp_jax.pipeline import Pipeline
    from rrfp_jax.runtime.process import Process

LOOP = "loop"


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        orders = resolve_entries(arguments.compare, arguments.window, STAGES, arguments.num_microbatches)
        words = dict(parse_entries(arguments.compare, OrderingOptions(window=arguments.window)))
        process = enter(
            num_stages=STAGES, configuration=vars(arguments), cluster=ClusterConfig(), platform="cpu", pinned=True
        )
    pipelines = {name: _pipeline(process, words[name].on(order.table)) for name, order in orders.items()}
    for turn in turns(process, arguments.turns):
        found: dict[str, list[float]] = {"step_ms": [], "losses": []}
        if turn["way"] != LOOP:
            found = _train(pipelines[turn["way"]], turn)
        elif process.rank == 0:
            found = _loop(turn)
        if process.rank == 0:
            print(json.dumps(found), flush=True)
    for pipeline in pipelines.values():
        pipeline.close()
    process.finish()
    return 0


def _chunks() -> list[Any]:
    import jax.numpy as jnp

    from rrfp_jax import Chunk

    def init(stage: int) -> Any:
        return lambda key: {f"stage {stage}": jnp.asarray(weights(stage))}

    def first(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:  # noqa: ARG001
        return _layers(params["stage 0"], leaves["inputs"])

    def last(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:  # noqa: ARG001
        errors = _layers(params["stage 1"], inputs) - leaves["targets"]
        return jnp.sum(errors**2), jnp.float32(errors.size)

    return [
        Chunk(name="first", init=init(0), apply=first, leaves=("inputs",)),
        Chunk(name="last", init=init(1), apply=last, leaves=("targets",)),
    ]


def _layers(layers: Any, value: Any) -> Any:
    import jax.numpy as jnp

    for one in layers:
        value = value + jnp.tanh(value @ one)
    return value


def _pipeline(process: "Process", ordering: Any) -> "Pipeline":
    import optax

    from rrfp_jax import Pipeline, UpdateRules

    return Pipeline(
        _chunks(),
        placement=linear(STAGES),
        optimizer=optax.sgd(LEARNING_RATE),
        ordering=ordering,
        process=process,
        updates=UpdateRules(skip_nonfinite=False),
    )


def _train(pipeline: "Pipeline", turn: dict[str, Any]) -> dict[str, list[float]]:
    import jax

    inputs, targets = batch(turn["microbatches"], turn["seed"])
    given = {"inputs": inputs, "targets": targets}
    state = pipeline.init(jax.random.key(0))
    pipeline.prepare(given)
    step_ms, losses = [], []
    for _ in range(turn["steps"]):
        begun_s = time.perf_counter()
        state, metrics = pipeline.step(state, given)
        losses.append(float(metrics.result().loss))
        step_ms.append((time.perf_counter() - begun_s) * 1e3)
    return {"step_ms": step_ms, "losses": losses}


@cache
def _plain_step() -> Any:
    """Returns one program for a whole step: the gradients of all microbatches one after another, and the update."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any, value: Any, target: Any) -> Any:
        for layers in params:
            value = _layers(layers, value)
        return jnp.mean((value - target) ** 2)

    @jax.jit
    def step(params: Any, inputs: Any, targets: Any) -> Any:
        def add(total: Any, microbatch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *microbatch)), None

        nothing = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (total, grads), _ = jax.lax.scan(add, nothing, (inputs, targets))
        count = len(inputs)
        return jax.tree.map(lambda one, grad: one - LEARNING_RATE * grad / count, params, grads), total / count

    return step


def _loop(turn: dict[str, Any]) -> dict[str, list[float]]:
    inputs, targets = batch(turn["microbatches"], turn["seed"])
    params: Any = [weights(stage) for stage in range(STAGES)]
    step_ms, losses = [], []
    for _ in range(turn["steps"]):
        begun_s = time.perf_counter()
        params, loss = _plain_step()(params, inputs, targets)
        losses.append(float(loss))
        step_ms.append((time.perf_counter() - begun_s) * 1e3)
    return {"step_ms": step_ms, "losses": losses}


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("model_ranks", __doc__)
    parser.add_argument("--turns", required=True, metavar="FILE", help="a file of lines that say what to run")
    add_size_arguments(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
