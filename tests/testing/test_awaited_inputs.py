"""Launches before the input on emulated accelerators: the runtime hands tasks over, and devices wait for inputs."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax import Chunk, Ordering, Pipeline, RuntimeOptions, UpdateRules, linear
from rrfp_jax.commands.studies import RULES
from rrfp_jax.core import InputPromised
from rrfp_jax.runtime import stage as program_stage
from rrfp_jax.runtime.failure import RunFailed
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.schedules import ScheduleRequest, Task, build_schedule, chain
from rrfp_jax.testing import AcceleratedStage, EmulatedAccelerator, emulate
from rrfp_jax.testing.emulated_stage import EmulatedStage
from tests.core.test_promises import activation
from tests.runtime.logged_runs import replays_as_recorded

TABLE = build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=6))


def run(num_steps=3):
    order = Ordering(schedule=TABLE).resolve(TABLE.placement, TABLE.graph)
    durations_ms = np.full((1, 3, 6, 3), 2.0)
    arbiters = order.arbiters(RULES, certain_ahead=True)
    return order, emulate(arbiters, durations_ms, num_steps, launch_ms=0.3, just_in_time=True, log_steps=num_steps + 1)


def test_devices_wait_for_inputs_and_logs_replay():
    order, emulation = run()
    spans = {(span.step, span.task): span for span in emulation.on_device.spans}
    assert len(spans) == 3 * len(list(order.graph.tasks()))
    for (step, task), span in spans.items():
        for dependency in order.graph.dependencies(task):
            assert spans[step, dependency].end_s <= span.start_s
    segments = [segment for log in emulation.logs.values() for segment in log.segments]
    assert all(map(replays_as_recorded, emulation.logs.values()))
    assert any(isinstance(event, InputPromised) for segment in segments for event, _ in segment.entries)
    for seen in emulation.timeline.spans:  # in which waiting for an input does not count as work
        for dependency in order.graph.dependencies(seen.task):
            assert spans[seen.step, dependency].end_s <= seen.start_s


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_the_report_names_the_task_that_failed_and_nothing_hangs(monkeypatch, where):
    plain = EmulatedStage.launch

    def fails() -> None:
        raise RuntimeError("broken arithmetic")

    def launch(stage, step, task):
        launched = plain(stage, step, task)
        if task == Task.parse("0F2") and step == 1:
            if where == "launch":
                fails()
            return launched._replace(wait=fails)
        return launched

    monkeypatch.setattr(EmulatedStage, "launch", launch)
    since_s = time.perf_counter()
    with pytest.raises(RunFailed, match=r"0F2 on stage 0 failed: .*broken arithmetic"):
        run()
    assert time.perf_counter() - since_s < 20


def test_what_was_fetched_is_not_taken_twice():
    mailbox = Mailbox(linear(3), 1, lambda value, *_: value, chain(3, 1))
    mailbox.begin(0)
    value = np.ones(4)
    assert not mailbox.fetch(0, activation(0), lambda: None)
    assert mailbox.fetch(0, activation(0), lambda: value)
    assert mailbox.take(0, activation(0)) is value
    mailbox.accept(0, activation(0), value)
    assert mailbox.held_bytes == 0
    mailbox.accept(0, activation(1), value)
    assert mailbox.fetch(0, activation(1), lambda: 1 / 0), "it is here"


def _layer(params, inputs, leaves, *, key):
    return jnp.tanh((leaves["x"] if inputs is None else inputs) @ params["w" if inputs is None else "v"])


def _loss(params, inputs, leaves, *, key):
    errors = inputs @ params["u"] - leaves["y"]
    return jnp.sum(errors**2), jnp.float32(errors.size)


def _train(options):
    def weights(name, *shape):
        return lambda key: {name: 0.3 * jax.random.normal(key, shape)}

    chunks = [
        Chunk(name="first", init=weights("w", 8, 16), apply=_layer, leaves=("x",)),
        Chunk(name="second", init=weights("v", 16, 16), apply=_layer, leaves=()),
        Chunk(name="last", init=weights("u", 16), apply=_loss, leaves=("y",)),
    ]
    x = jax.random.normal(jax.random.key(1), (6, 4, 8))
    batch = {"x": x, "y": jnp.sin(x).sum(axis=-1)}
    ordering = Ordering(schedule=TABLE)
    rules = UpdateRules(deterministic=True)
    with Pipeline(
        chunks, placement=linear(3), optimizer=optax.sgd(0.1), ordering=ordering, options=options, updates=rules
    ) as pipeline:
        state, losses = pipeline.init(jax.random.key(0)), []
        for _ in range(4):
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        return losses, jax.tree.map(np.array, pipeline.params(state))


def test_a_model_trains_to_the_same_bits(monkeypatch):
    """With outputs that are handed on at the launch, as on accelerators."""
    plain = _train(RuntimeOptions())
    fetched = []

    class Counting(AcceleratedStage):
        def fetch(self, step, message, ahead):
            fetched.append(message)
            return super().fetch(step, message, ahead)

    monkeypatch.setattr(program_stage, "is_on_host", lambda sharding: False)
    losses, params = _train(
        RuntimeOptions(
            dispatch_ahead="just-in-time",
            wrap_stage=lambda stage: Counting(stage, EmulatedAccelerator(launch_ms=0.3), lambda step, task: 3.0),
        )
    )
    assert fetched
    assert losses == plain[0]
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(plain[1])))
