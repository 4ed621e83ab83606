"""Packed rows of a token set through a pipeline: what documents train alone, and nothing of one in another."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.data import Tokens, TokensConfig
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.schedules import linear
from tests.data.token_sets import VOCAB, token_set
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly

LENGTH, NUM_STEPS = 24, 3
MODEL = LanguageModelConfig(
    vocab_size=VOCAB, hidden=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=24, init_std=0.2
)
WAYS: list[Any] = [
    {},
    pytest.param({"backward": "split", "hint": "bfw", "remat": "full"}, marks=pytest.mark.slow),
    pytest.param({"remat": "dots"}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "backward": "split", "hint": "bfw"}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "backward": "split", "hint": "bfw", "remat": "full"}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "backward": "split", "hint": "bfw"}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Rows of one to six documents, none of which is cut."""
    path = tmp_path_factory.mktemp("tokens") / "set"
    token_set(path, np.random.default_rng(0).integers(1, LENGTH, size=80).tolist())
    config = TokensConfig(path=(str(path),), length=LENGTH, batch_size=8, num_microbatches=4, pack=True)
    return Tokens(config)


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.3, momentum=0.9)


def documents_alone(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """A row for each document of a batch, padded at its end, ``[1, documents, length]``; as many for every batch."""
    rows = {name: np.zeros((1, 64, LENGTH), leaf.dtype) for name, leaf in batch.items()}
    number = 0
    flat = {name: leaf.reshape(-1, LENGTH) for name, leaf in batch.items()}
    for row, segments in enumerate(flat["segments"]):
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            for name, leaf in flat.items():
                rows[name][0, number, : own.sum()] = leaf[row, own]
            number += 1
    assert 8 < number < 64
    return {name: rows[name] for name in ("tokens", "targets", "weights")}


def trained(batches: list[dict[str, Any]], way: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses and final parameters of a pipeline of two stages."""
    chunks = language_model(MODEL).split(2, packed=True)
    with make_pipeline(chunks, placement=linear(2), optimizer=optimizer(), **way) as pipeline:
        state, results = pipeline.init(jax.random.key(0)), []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        return [each.result().loss for each in results], jax.tree.map(np.array, pipeline.params(state))


def initial() -> dict[str, Any]:
    params: dict[str, Any] = {}
    with make_pipeline(
        language_model(MODEL).split(2, packed=True), placement=linear(2), optimizer=optimizer()
    ) as pipeline:
        params |= jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(0))))
    return params


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_packed_documents_train_what_they_train_alone(data: Tokens, way: dict[str, Any]) -> None:
    batches = [data.batch(step) for step in range(NUM_STEPS)]
    expected = train_plainly(
        language_model(MODEL).split(1), initial(), optimizer(), [documents_alone(batch) for batch in batches]
    )
    assert_same_training(*trained(batches, way), *expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_document_leaves_no_trace_in_the_bits_of_others(data: Tokens, way: dict[str, Any]) -> None:
    """Only the second document of each row counts; the first is another text, and the rest of the row too."""
    batch = data.batch(0)
    counts = batch["segments"] == 2
    assert counts.any()
    batch = batch | {"weights": batch["weights"] * counts}
    changed = batch | {"tokens": np.where(counts, batch["tokens"], (batch["tokens"] + 7) % VOCAB)}
    way = way | {"deterministic": True}
    (losses, params), (other_losses, other_params) = (trained([each], way) for each in (batch, changed))
    assert losses == other_losses
    jax.tree.map(np.testing.assert_array_equal, params, other_params)
    seen = batch | {"tokens": np.where(counts, (batch["tokens"] + 7) % VOCAB, batch["tokens"])}
    assert trained([seen], way)[0] != losses
