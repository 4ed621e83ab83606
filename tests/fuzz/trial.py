"""Try one composition: the pipeline beside the plain loop."""

import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.training.loop import RunSaver
from tests.fuzz.building import pipeline_of
from tests.fuzz.comparing import (
    Difference,
    check_start,
    compare,
    compare_bits,
    compare_evaluation,
    compare_step,
    rounded,
)
from tests.fuzz.composition import READY, TWO_WAYS, Composition
from tests.fuzz.models import absent_pairs, as_batch, buckets, microbatches
from tests.fuzz.plain import PlainLoop, Step

PASSED, REFUSED, FOUND, HUNG = "passed", "refused", "found", "hung"
_RAW_MESSAGE = re.compile(
    r"^$|Traceback|object is not|got an unexpected|has no attribute|not supported between|unsupported operand"
    r"|list index|is shorter than|argument \d|XLA|Unable to|tracer|pytree|INVALID_ARGUMENT|is not a valid JAX",
)
"""Pattern of messages that come from Python or JAX, not from the library."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a composition."""

    kind: str
    """The kind of outcome: ``passed``, ``refused``, ``found`` or ``hung``."""
    text: str = ""
    """The reason of a refusal, or the difference that was found."""

    @property
    def sentence(self) -> str:
        """The text without its numbers and names, by which equal refusals and findings are known."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]", "_", self.text.split("\n")[0])
        return re.sub(r"_[\s,_]*_|(?<!\w)-?[\w.-]*\d[\w.+-]*|\bnan\b", "_", text)[:200]


def tried(composition: Composition) -> Outcome:
    """Run a composition and return its outcome; raises nothing.

    It is refused by a ValueError of the library that comes before the first step, in words of the library; any other
    error is a finding.
    """
    trial = _Trial(composition)
    try:
        trial.run()
    except Difference as error:
        return Outcome(FOUND, str(error))
    except Exception as error:
        is_refused = isinstance(error, ValueError) and not trial.results and _is_raised_in_library(error)
        if is_refused and not _RAW_MESSAGE.search(str(error)):
            return Outcome(REFUSED, str(error))
        return Outcome(FOUND, f"{type(error).__name__}: {error}")
    return Outcome(PASSED)


def _is_raised_in_library(error: BaseException) -> bool:
    """Returns whether the library's own code raised the error, not JAX or Python underneath."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/rrfp_jax/" in trace.tb_frame.f_code.co_filename


class _Trial:
    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.results: list[Any] = []
        """The results of all steps that were enqueued."""
        self._expected: list[Step] = []

    def run(self) -> None:
        """Run the pipeline beside the plain loop; raises Difference, and any error that the library raises."""
        composition = self.composition
        with pipeline_of(composition) as pipeline:
            state = pipeline.init(jax.random.key(composition.data_seed))
            start = _copied(pipeline.params(state))
            check_start(composition, start)
            plain = PlainLoop(composition, start)
            state = self._train(pipeline, state, range(2), plain)
            if composition.restore:
                final = self._go_on_elsewhere(pipeline, state, plain)
            else:
                state = self._train(pipeline, state, range(2, composition.steps), plain)
                final = _copied(pipeline.params(state))
        try:
            self._compare(start, final, plain)
        except Difference:
            # Some compositions turn one rounding into a step: a network near a kink, or a matrix that is made
            # orthogonal from bfloat16. A difference that one rounding of the start makes in the plain loop is none.
            self._compare(start, final, plain, self._rounded_loops(start))
        if composition.deterministic and not composition.restore and not composition.operation:
            self._check_bits(final)

    def _rounded_loops(self, start: Any) -> list[tuple[list[Step], PlainLoop]]:
        """Returns plain loops, with their steps, from starts that differ from this one by a rounding."""
        loops = []
        for seed in range(3):
            loop = PlainLoop(self.composition, start)
            loop.trained = rounded(loop.trained, seed)
            loops.append(([loop.step(number) for number in range(len(self._expected))], loop))
        return loops

    def _compare(
        self, start: Any, final: Any, plain: PlainLoop, others: Sequence[tuple[list[Step], PlainLoop]] = ()
    ) -> None:
        for number, (result, step) in enumerate(zip(self.results, self._expected, strict=True)):
            compare_step(self.composition, number, result.result(), step, [steps[number] for steps, _ in others])
        compare(self.composition, start, final, plain.params, [loop.params for _, loop in others])

    def _train(
        self, pipeline: Pipeline, state: Any, steps: Iterable[int], plain: PlainLoop | None, **changes: Any
    ) -> Any:
        """Train for these steps; ``plain`` does the same, and both evaluate between."""
        composition = replace(self.composition, **changes)
        shapes, first = buckets(composition), as_batch(microbatches(composition, 0))
        evaluation = EvaluationShapes(buckets=shapes or microbatches(composition, 0)[:1])
        pipeline.prepare(first, buckets=shapes, evaluation=evaluation if composition.evaluates else None)
        for number in steps:
            batch, absent = as_batch(microbatches(composition, number)), absent_pairs(composition, number)
            state, metrics = pipeline.step(state, batch, absent=absent)
            self.results.append(metrics)
            if plain is None:
                continue
            self._expected.append(plain.step(number))
            if composition.evaluates and number in (0, composition.steps - 1):
                compare_evaluation(composition, pipeline.evaluate(state, first).result(), plain.evaluate(0))
        return state

    def _go_on_elsewhere(self, pipeline: Pipeline, state: Any, plain: PlainLoop) -> Any:
        """Take the states over to another pipeline, or save and restore them; returns the final parameters."""
        steps = range(2, self.composition.steps)
        if self.composition.restore == "states":
            held = [each for _, each in pipeline.chunk_states(state)]
            with pipeline_of(self.composition) as other:
                state = self._train(other, other.restore(held, 2), steps, plain)
                return _copied(other.params(state))
        changes = _elsewhere(self.composition)
        with tempfile.TemporaryDirectory() as folder, pipeline_of(replace(self.composition, **changes)) as other:
            saver = RunSaver(Path(folder), pipeline, every=None, minutes=None, keep=1)
            saver.save(state, {})
            saver.checkpoints.close()
            saver = RunSaver(Path(folder), other, every=None, minutes=None, keep=1)
            with closing(saver.checkpoints):
                found = saver.checkpoints.newest()
                if found is None:
                    raise Difference("what was saved is not found again")
                state = saver.restore(found)
            state = self._train(other, state, steps, plain, **changes)
            return _copied(other.params(state))

    def _check_bits(self, params: Any) -> None:
        """Check that another order gives the same bits in deterministic mode."""
        hint, backward = ("f-priority", "split") if self.composition.is_split else ("fb", "")
        is_two_way = self.composition.placement in TWO_WAYS
        order = {"window": None} if is_two_way else {"window": 1, "schedule": ""}
        changes = {"consume": READY, "hint": hint, "backward": backward, "evaluates": False, **order}
        losses = [metrics.result().loss for metrics in self.results]
        with pipeline_of(replace(self.composition, **changes)) as pipeline:
            state = pipeline.init(jax.random.key(self.composition.data_seed))
            state = self._train(pipeline, state, range(self.composition.steps), None, **changes)
            again = _copied(pipeline.params(state))
        losses_again = [metrics.result().loss for metrics in self.results[len(losses) :]]
        compare_bits([losses, losses_again], [params, again])


def _elsewhere(composition: Composition) -> dict[str, Any]:
    """Returns the changes that put the model on another layout: one stage, no mesh, and other replicas."""
    order = {"schedule": "", "consume": READY, "hint": "fb", "window": None, "backward": "", "operation": ""}
    if composition.placement in TWO_WAYS:  # it has no other layout without a table for it
        return {"mesh": (), "cuts_params": False}
    data = 2 if composition.data == 1 and composition.microbatches % 2 == 0 else 1
    share = composition.microbatches * composition.data // data
    changed = {"stages": 1, "mesh": (), "cuts_params": False, "shard_optimizer": False}
    return {**order, **changed, "data": data, "microbatches": share}


def _copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)
