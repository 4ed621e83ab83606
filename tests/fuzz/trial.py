"""One composition tried: the pipeline beside the plain loop, and how they differ."""

import re
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rrfp_jax.arbitration import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planning.layout import Layout
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.runtime.evaluating import EvaluationShapes
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule
from rrfp_jax.tasks import PipelineGraph, Placement, linear, looped
from rrfp_jax.tasks.placements import bidirectional, v_shaped, waves
from rrfp_jax.training.saving import RunSaver
from tests.environment import NUM_VIRTUAL_DEVICES
from tests.fuzz.composition import BIDIRECTIONAL, LINEAR, WAVE, Composition
from tests.fuzz.models import absent_pairs, as_batch, buckets, is_exact, microbatches, model_of
from tests.fuzz.plain import PlainLoop, Step, optimizer_of

PASSED, REFUSED, FOUND, HUNG = "passed", "refused", "found", "hung"
_ANY_PLACEMENT = ("gpipe", "1f1b", "1f1b-split", "zb-h1", "zb-h2")
_RAW_MESSAGE = re.compile(
    r"^$|Traceback|object is not|got an unexpected|has no attribute|not supported between|unsupported operand"
    r"|list index|is shorter than|argument \d|XLA|Unable to|tracer|pytree|must be a|INVALID_ARGUMENT",
)
"""Words of messages that come from Python or JAX, not from the library."""


@dataclass(frozen=True)
class Outcome:
    """What became of a composition."""

    kind: str
    """``passed``, ``refused``, ``found`` or ``hung``."""
    text: str = ""
    """Why it was refused, or what differs."""

    @property
    def sentence(self) -> str:
        """The text without its numbers and names, by which equal refusals and findings are known."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]", "_", self.text.split("\n")[0])
        return re.sub(r"_[\s,_]*_|\b[\w.-]*\d[\w.]*\b", "_", text)[:200]


class Difference(Exception):
    """The pipeline gave something else than the plain loop."""


def tried(composition: Composition) -> Outcome:
    """Run a composition; nothing is raised."""
    try:
        _try(composition)
    except Difference as error:
        return Outcome(FOUND, str(error))
    except ValueError as error:
        text = str(error)
        in_library = _is_raised_in_library(error)
        if in_library and not _RAW_MESSAGE.search(text):
            return Outcome(REFUSED, text)
        return Outcome(FOUND, f"ValueError: {text}")
    except Exception as error:  # an error of another kind is a finding
        return Outcome(FOUND, f"{type(error).__name__}: {error}")
    return Outcome(PASSED)


def _is_raised_in_library(error: BaseException) -> bool:
    """Whether the library's own code raised it, not JAX or Python underneath."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/rrfp_jax/" in trace.tb_frame.f_code.co_filename


# -- the pipeline ------------------------------------------------------------------------------------------------------


def placement_of(composition: Composition) -> Placement:
    """Which stage owns which chunk."""
    stages = composition.stages
    match composition.placement:
        case "linear":
            return linear(stages)
        case "looped":
            return looped(stages, 2)
        case "v":
            return v_shaped(stages)
        case "wave":
            return waves(stages, 2)
        case "bidirectional":
            return bidirectional(stages)
    number = composition.num_chunks
    return Placement(tuple(c * stages // number for c in range(number)))


_bases: dict[Composition, Pipeline] = {}
_MOST_BASES = 3
"""How many setups keep their compiled programs."""


def forget() -> None:
    """Drop the compiled programs of all setups."""
    _bases.clear()


def pipeline_of(composition: Composition) -> Pipeline:
    """A pipeline for this composition, with what is compiled for its setup already."""
    setup, ordering = composition.setup, ordering_of(composition)
    if setup not in _bases:
        while len(_bases) >= _MOST_BASES:
            del _bases[next(iter(_bases))]
        _bases[setup] = _first_of(setup, ordering)
    options = RuntimeOptions(dispatch_ahead=composition.dispatch, progress_deadline_s=60)
    return _bases[setup].reordered(ordering, options=options)


def _first_of(setup: Composition, ordering: Ordering) -> Pipeline:
    model = model_of(setup)
    layout = Layout(num_stages=setup.stages, data=setup.data, mesh=dict(setup.mesh) or ())
    return Pipeline(
        mirrored(model.chunks) if setup.placement == BIDIRECTIONAL else model.chunks,
        optimizer=optimizer_of(setup),
        placement=placement_of(setup),
        edges=model.edges,
        process=Process(layout, num_devices=min(layout.num_devices, NUM_VIRTUAL_DEVICES)),
        ordering=ordering,
        updates=UpdateRules(
            clip_norm=setup.clip,
            skip_nonfinite=setup.skip_nonfinite,
            deterministic=setup.deterministic,
            shard_optimizer=setup.shard_optimizer,
        ),
        remat=setup.remat,
        seed=setup.seed,
    )


def ordering_of(composition: Composition) -> Ordering:
    """The order of tasks that a composition asks for."""
    table = _table(composition) if composition.schedule else None
    follows = table is not None and not composition.hint
    ops: tuple[Any, ...] = ()
    if composition.operation:
        from rrfp_jax import operations

        if table is None:
            ops = (operations.recompute(0.5),)
        elif composition.operation == "recompute":
            table = operations.recomputed(table, 0.5)
        elif composition.operation == "offload":
            slots = max(2, int(max(table.peak_activations())) - 1)
            table = operations.offload(table, slots, copy_ms=0.01, consume=composition.consume)
        elif hasattr(operations, "gathered"):
            table = operations.gathered(table, prefetch=1)
    guided = follows and composition.consume == "ready"
    return Ordering(
        schedule=table,
        consume=composition.consume,
        hint=composition.hint or None,
        window=composition.window,
        backward=composition.backward or None,
        foresight=False if guided and not composition.foresight else None,
        footprint=False if guided and not composition.footprint else None,
        read_ahead=composition.read_ahead or None,
        adaptive=composition.adaptive,
        ops=ops,
    )


def _table(composition: Composition) -> ScheduleTable:
    sizes: dict[str, Any] = {"num_stages": composition.stages, "num_microbatches": composition.microbatches}
    is_own = composition.placement == LINEAR or composition.schedule not in _ANY_PLACEMENT
    if not is_own:
        model, placement = model_of(composition.setup), placement_of(composition)
        edges = model.edges
        if edges is None:
            from rrfp_jax.tasks.graph import chain

            sizes["graph"] = chain(placement.num_chunks, composition.microbatches)
        else:
            sizes["graph"] = PipelineGraph(len(model.chunks), composition.microbatches, edges)
        sizes["placement"] = placement
    elif composition.placement == WAVE:
        sizes["chunks_per_stage"] = 4
    if composition.schedule == "gis":
        sizes["group_size"] = composition.stages
    return build_schedule(composition.schedule, ScheduleRequest(**sizes))


# -- training beside the plain loop ------------------------------------------------------------------------------------


def _try(composition: Composition) -> None:
    key = jax.random.key(composition.data_seed)
    with pipeline_of(composition) as pipeline:
        state = pipeline.init(key)
        start = _copied(pipeline.params(state))
        _check_start(composition, start)
        plain = PlainLoop(composition, start)
        state, results, expected = _train(composition, pipeline, plain, state, range(2))
        if composition.restore == "states":
            held = [each for _, each in pipeline.chunk_states(state)]
            with pipeline_of(composition) as other:
                state = other.restore(held, 2)
                final = _finish(composition, other, plain, state, results, expected)
        elif composition.restore == "saved":
            elsewhere = _elsewhere(composition)
            with tempfile.TemporaryDirectory() as folder, pipeline_of(elsewhere) as other:
                _save(pipeline, state, Path(folder))
                state = _restore(other, Path(folder))
                final = _finish(elsewhere, other, plain, state, results, expected)
        else:
            final = _finish(composition, pipeline, plain, state, results, expected)
    _compare(composition, start, final, plain.params)
    if composition.deterministic and not composition.restore and not composition.operation:
        _check_bits(composition, key, final, [result.loss for result in results])


def _finish(
    composition: Composition, pipeline: Pipeline, plain: PlainLoop, state: Any, results: Any, expected: Any
) -> Any:
    steps = range(2, composition.steps)
    state, more, more_expected = _train(composition, pipeline, plain, state, steps)
    results += more
    expected += more_expected
    for number, (result, step) in enumerate(zip(results, expected, strict=True)):
        _compare_step(composition, number, result, step)
    return _copied(pipeline.params(state))


def _train(composition: Composition, pipeline: Pipeline, plain: PlainLoop, state: Any, steps: Sequence[int]) -> Any:
    shapes = buckets(composition)
    evaluation = EvaluationShapes(buckets=shapes or microbatches(composition, 0)[:1]) if composition.evaluates else None
    pipeline.prepare(as_batch(microbatches(composition, 0)), buckets=shapes, evaluation=evaluation)
    metrics, expected, evaluated = [], [], None
    for number in steps:
        batch = as_batch(microbatches(composition, number))
        state, enqueued = pipeline.step(state, batch, absent=_absent(composition, number))
        metrics.append(enqueued)
        expected.append(plain.step(number))
        if composition.evaluates and number in (0, composition.steps - 1) and number in steps:
            evaluated = pipeline.evaluate(state, as_batch(microbatches(composition, 0)))
            _compare_evaluation(composition, evaluated.result(), plain.evaluate(0))
    return state, [each.result() for each in metrics], expected


def _absent(composition: Composition, step: int) -> tuple[tuple[int, int], ...]:
    return absent_pairs(composition, step)


def _elsewhere(composition: Composition) -> Composition:
    """The same model on another layout: fewer stages, no replicas and no mesh, or two replicas where there was one."""
    data = 2 if composition.data == 1 and composition.microbatches % 2 == 0 else 1
    microbatches = composition.microbatches * composition.data // data
    plain = {"mesh": (), "cuts_params": False, "data": data, "microbatches": microbatches, "shard_optimizer": False}
    order = {"schedule": "", "consume": "ready", "hint": "fb", "window": None, "operation": "", "backward": ""}
    where: dict[str, Any] = {} if composition.placement == BIDIRECTIONAL else {"stages": 1}
    if composition.placement == BIDIRECTIONAL:
        order = {}
        plain |= {"data": composition.data, "microbatches": composition.microbatches}
    return replace(composition, restore="", **plain, **order, **where)


def _save(pipeline: Pipeline, state: Any, folder: Path) -> None:
    saver = RunSaver(folder, pipeline, every=None, minutes=None, keep=1)
    saver.save(state, {})
    saver.checkpoints.close()


def _restore(pipeline: Pipeline, folder: Path) -> Any:
    saver = RunSaver(folder, pipeline, every=None, minutes=None, keep=1)
    with closing(saver.checkpoints):
        found = saver.checkpoints.newest()
        if found is None:
            raise Difference("what was saved is not found again")
        return saver.restore(found)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _tolerances(composition: Composition) -> tuple[float, float, float]:
    """Of losses and norms, of how far parameters move, and of parameters themselves, all relative.

    Sums of some thousand float32 terms are exact to about 1e-6 of their largest part, and gradients of microbatches
    cancel each other in part. Where values are rounded to bfloat16 on the way, a term that lies between two of its
    numbers may go either way, by 2**-8.
    """
    if not is_exact(composition):
        return 5e-3, 5e-2, 2e-3
    return (2e-5, 2e-3, 2e-6) if composition.optimizer == "muon" else (2e-5, 2e-4, 1e-6)


def _close(value: float, expected: float, rtol: float) -> bool:
    return bool(np.isclose(value, expected, rtol=rtol, atol=1e-7, equal_nan=True))


def _compare_step(composition: Composition, number: int, result: Any, step: Step) -> None:
    rtol = _tolerances(composition)[0]
    if result.skipped != step.skipped:
        raise Difference(f"skipped of step {number} is {result.skipped}, of the plain loop {step.skipped}")
    if not _close(result.weight, step.weight, 1e-6):
        raise Difference(f"weight of step {number} is {result.weight}, of the plain loop {step.weight}")
    if not _close(result.loss, step.loss, rtol):
        raise Difference(f"loss of step {number} is {result.loss}, of the plain loop {step.loss}")
    if result.grad_norm is not None and not _close(result.grad_norm, step.norm, rtol):
        raise Difference(f"norm of step {number} is {result.grad_norm}, of the plain loop {step.norm}")
    for name, mean in step.means.items():
        if not np.isclose(result.means[name], mean, rtol=10 * rtol, atol=1e-5, equal_nan=True):
            raise Difference(f"mean {name!r} of step {number} is {result.means[name]}, of the plain loop {mean}")


def _compare_evaluation(composition: Composition, result: Any, expected: tuple[float, float]) -> None:
    for name, value, plain in zip(("loss_sum", "weight"), (result.loss_sum, result.weight), expected, strict=True):
        if not _close(value, plain, _tolerances(composition)[0]):
            raise Difference(f"{name} of the evaluation is {value}, of the plain loop {plain}")


def _compare(composition: Composition, start: Any, params: Any, expected: Any) -> None:
    """Each array by the norm of what it moved, and by its own."""
    _, of_moved, of_size = _tolerances(composition)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise Difference(
            f"parameters are {jax.tree.structure(params)}, of the plain loop {jax.tree.structure(expected)}"
        )
    leaves = [map(_wide, jax.tree.leaves(tree)) for tree in (start, params, expected)]
    for name, first, value, plain in zip(names, *leaves, strict=True):
        if np.array_equal(value, plain, equal_nan=True):
            continue
        distance = np.linalg.norm(value - plain)
        allowed = of_moved * np.linalg.norm(plain - first) + of_size * np.linalg.norm(plain)
        if not distance <= allowed:
            raise Difference(
                f"parameter {name} differs by {distance:.3g} from the plain loop's, which moved by "
                f"{np.linalg.norm(plain - first):.3g}; {allowed:.3g} is allowed"
            )


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64).ravel()


def _check_start(composition: Composition, params: Any) -> None:
    """Layers that draw their values from the key alone must not start equal."""
    drawn = {name: _wide(layer["w"]) for name, layer in params.items() if name.startswith("layers") and "w" in layer}
    for name, value in drawn.items():
        for other, beside in drawn.items():
            if composition.model == "raw" and name < other and np.array_equal(value, beside):
                raise Difference(f"layers {name!r} and {other!r} start with equal values")


def _check_bits(composition: Composition, key: Any, params: Any, losses: list[float]) -> None:
    """In deterministic mode another order gives the same bits."""
    hint, backward = ("f-priority", "split") if composition.is_split else ("fb", "")
    other = replace(composition, evaluates=False, consume="ready", hint=hint, backward=backward, window=1)
    is_two_way = composition.placement == BIDIRECTIONAL
    other = replace(other, window=None) if is_two_way else replace(other, schedule="")
    with pipeline_of(other) as pipeline:
        state = pipeline.init(key)
        pipeline.prepare(as_batch(microbatches(other, 0)), buckets=buckets(other))
        found = []
        for number in range(other.steps):
            state, metrics = pipeline.step(state, as_batch(microbatches(other, number)), absent=_absent(other, number))
            found.append(metrics)
        again = _copied(pipeline.params(state))
        losses_again = [each.result().loss for each in found]
    if not np.array_equal(losses, losses_again, equal_nan=True):
        raise Difference(f"losses {losses} of a deterministic run are {losses_again} in another order")
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(again), strict=True):
        if not np.array_equal(_wide(one), _wide(two), equal_nan=True):
            raise Difference(f"parameter {jax.tree_util.keystr(path)} of a deterministic run differs in another order")


def _copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)
