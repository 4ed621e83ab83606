"""Published schedules in a user's file: at most ten lines each, and they validate, are drawn, simulated and trained."""

import ast
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.schedules.slots import EQUAL, drawing, execute, per_stage
from rrfp_jax.simulation import Costs, constant, simulate

FILE = Path(__file__).with_name("published_elsewhere.py")
NAMES = ("dapple", "gems", "wide-groups", "interleaved-zero-bubble", "dualpipe")
RULES = StepRules(updates=False, agreement=Agreement.NONE)


def table(name: str, p: int, m: int) -> Any:
    return build_schedule(f"{FILE}:{name}", ScheduleRequest(num_stages=p, num_microbatches=m))


def test_each_has_at_most_ten_lines() -> None:
    functions = [node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == len(NAMES)
    for function in functions:
        statements = function.body[1:]  # behind the docstring
        assert statements[-1].end_lineno - statements[0].lineno + 1 <= 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_it_is_valid_drawn_and_simulated(name: str, p: int, m: int) -> None:
    found = table(name, p, m)
    slots = execute(found, per_stage(found, EQUAL))
    assert len(drawing(slots, 1 / 6).splitlines()) == p
    for consume in ("strict", "ready"):
        order = Ordering(schedule=found, consume=consume).resolve(found.placement, found.graph)
        simulation = simulate(order.arbiters(RULES), Costs(durations_ms=constant((10, 10, 10), order.graph)))
        assert len(simulation.timeline.spans) == sum(map(len, found.orders))


def test_they_do_what_their_papers_say() -> None:
    """Peaks, and the bubble beside the schedules that each is to improve."""
    p, m = 8, 32

    def step(found: Any) -> float:
        return execute(found, per_stage(found, EQUAL)).makespan

    known = {
        name: build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m))
        for name in ("1f1b", "interleaved-1f1b", "chimera", "dualpipe-v")
    }
    found = {name: table(name, p, m) for name in NAMES}
    assert found["dapple"].peak_in_flight() == (8, 8, 8, 8, 7, 5, 3, 1)
    assert max(found["gems"].peak_activations()) <= 2
    assert step(found["gems"]) > 3 * step(known["chimera"]), "it saves memory, and idles"
    assert step(found["wide-groups"]) == step(known["interleaved-1f1b"]), "without a way between stages"
    assert step(found["interleaved-zero-bubble"]) < step(known["interleaved-1f1b"])
    assert step(found["dualpipe"]) < step(known["1f1b"])
    assert max(found["dualpipe"].peak_activations()) == p + 1, "as published"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_leaves_the_bits_of_any_other_order(name: str) -> None:
    import jax
    import numpy as np
    import optax

    from rrfp_jax.pipeline import Pipeline
    from rrfp_jax.programs.model_graph import mirrored
    from rrfp_jax.runtime.options import UpdateRules
    from tests.programs.toys import VOCAB, plain_model

    found = table(name, 2, 4)
    two_ways = bool(found.graph.shared)
    num_chunks = found.graph.num_chunks // (2 if two_ways else 1)
    chunks = plain_model((1,) * num_chunks, tied=False)
    strict = Ordering(schedule=found, consume="strict")
    chunks = mirrored(chunks) if two_ways else chunks
    base = Pipeline(chunks, optimizer=optax.adam(1e-2), ordering=strict, updates=UpdateRules(deterministic=True))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (4, 2, 9)).astype(np.int32)
    weights = np.ones((4, 2, 8), np.float32)
    batch = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}

    def trained(ordering: Ordering) -> list[bytes]:
        with base.reordered(ordering) as pipeline:
            state = pipeline.init(jax.random.key(1))
            losses = []
            for _ in range(4):
                state, metrics = pipeline.step(state, batch)
                losses.append(metrics)
            params = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(pipeline.params(state))]
            return [np.float64([one.result().loss for one in losses]).tobytes(), *params]

    assert trained(strict) == trained(Ordering(schedule=found, hint="bf", window=1))
