"""Answers that are right in every token, counted as one would by hand."""

import jax
import numpy as np
import pytest

from rrfp_jax.models.cuts import SequenceOrder
from rrfp_jax.models.loss import ANSWER_TOKENS, ANSWERS, EXACT_ANSWERS, RIGHT_TOKENS, answer_counts

LENGTH, VOCAB = 24, 5


def counted_by_hand(is_right, weights, segments):
    """Each answer as a list of whether its tokens are right."""
    answers = []
    for row in range(len(weights)):
        last = None
        for at in range(LENGTH):
            here = segments[row, at] if weights[row, at] > 0 else None
            if here is not None:
                if here != last:
                    answers.append([])
                answers[-1].append(bool(is_right[row, at]))
            last = here
    return {
        ANSWERS: len(answers),
        EXACT_ANSWERS: sum(map(all, answers)),
        ANSWER_TOKENS: sum(map(len, answers)),
        RIGHT_TOKENS: sum(map(sum, answers)),
    }


@pytest.mark.parametrize("context", [None, SequenceOrder(3, None)])
@pytest.mark.parametrize("packed", [True, False])
def test_counts_are_those_by_hand(packed, context):
    rng = np.random.default_rng(3)
    targets = rng.integers(VOCAB, size=(60, LENGTH)).astype(np.int32)
    is_right = rng.random(targets.shape) < 0.8
    best = np.where(is_right, targets, (targets + 1) % VOCAB)
    weights = (rng.random(targets.shape) < 0.7).astype(np.float32) * rng.choice([0.5, 1.0], targets.shape)
    segments = np.cumsum(rng.random(targets.shape) < 0.2, axis=1) if packed else np.ones_like(targets)
    expected = counted_by_hand(is_right, weights, segments)
    assert 0 < expected[EXACT_ANSWERS] < expected[ANSWERS]
    order = None if context is None else context(LENGTH)
    places = np.arange(LENGTH) if order is None else order
    logits = np.eye(VOCAB, dtype=np.float32)[best]
    leaves = [leaf[:, places] for leaf in (logits, targets, weights.astype(np.float32), segments)]
    found = jax.jit(lambda *given: answer_counts(*given, order=order))(*leaves[:3], leaves[3] if packed else None)
    assert {name: float(value) for name, value in found.items()} == expected


def test_nothing_is_asked_in_padding():
    nothing = np.zeros((2, 8), np.int32)
    found = answer_counts(np.zeros((2, 8, VOCAB), np.float32), nothing, nothing.astype(np.float32), nothing)
    assert {float(value) for value in found.values()} == {0.0}
