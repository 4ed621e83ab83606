"""Checkpoints of vocabularies in shards fit every number of shards, and show whole layers to whoever reads them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.checkpoint._reader import _saved_arrays, read_arrays
from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import open_model
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import linear
from rrfp_jax.training.loop import RunSaver
from tests.hf.random_folder import TINY_LLAMA, write_folder
from tests.pipelines import make_pipeline
from tests.test_pipeline_vocabulary import LAYERS, MODELS, OPTIMIZER, Ways, batches, pipeline_of


def saved_pipeline(model: str, shards: int, **options: Any) -> Any:
    """A pipeline with a part of the layers frozen; 1 shard stands for a model that is not cut into any."""
    cut = language_model(MODELS[model])
    frozen = ["layers.1"]
    if shards > 1:
        graph = cut.split_vocabulary(shards, layers_per_chunk=LAYERS[shards])
        return pipeline_of(replace(graph, chunks=freeze(graph.chunks, frozen)), **options)
    chunks = freeze(cut.split(2), frozen)
    return make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, clip_norm=1.0, **options)


def saved_values(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the newest step, by their names in whole layers."""
    stored = newest_step(folder)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = {
        name: jax.ShapeDtypeStruct(saved.shape, np.dtype(saved.dtype), sharding=whole)
        for name, saved in _saved_arrays(stored).items()
    }
    return {"/".join(name): np.asarray(array) for name, array in read_arrays(stored, specs).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "between"), [("tied", {}), ("untied", {"data": 2, "shard_optimizer": True})], ids=str
)
def test_a_checkpoint_fits_every_number_of_shards(model: str, between: Ways, tmp_path: Path) -> None:
    """From 4 shards to 2, to none and back, bit for bit; and whoever reads it sees whole layers."""

    def saver(number: int, pipeline: Any) -> RunSaver:
        return RunSaver(tmp_path / str(number), pipeline, every=1, minutes=None, keep=1)

    with saved_pipeline(model, 4) as pipeline:
        state = pipeline.init(jax.random.key(1))
        for batch in batches():
            state, metrics = pipeline.step(state, batch)
            metrics.result()
        params = jax.tree.map(np.array, pipeline.params(state))
        moments = [
            np.array(each.optimizer_state[0][0].mu["embedding"]["table"])
            for c, each in pipeline.chunk_states(state)
            if c < 4
        ]
        saving = saver(0, pipeline)
        saving.save(state, {})
        saving.checkpoints.close()
        state, metrics = pipeline.step(state, batches()[0])
        next_loss = metrics.result().loss
    expected = saved_values(tmp_path / "0")
    np.testing.assert_array_equal(expected["embedding/optimizer/0/mu/embedding/table"], np.concatenate(moments))
    for number, shards in enumerate([2, 1, 3, 4, 1]):
        stored = newest_step(tmp_path / str(number))
        jax.tree.map(np.testing.assert_array_equal, read_params(stored), params)
        options = between if number % 2 == 0 else {}
        with saved_pipeline(model, shards, **options) as pipeline:
            saving = saver(number, pipeline)
            found = saving.checkpoints.newest()
            assert found is not None
            state = saving.restore(found)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, pipeline.params(state)), params)
            saving.checkpoints.close()
            saving = saver(number + 1, pipeline)
            saving.save(state, {})
            saving.checkpoints.close()
            values = saved_values(tmp_path / str(number + 1))
            assert values.keys() == expected.keys()
            jax.tree.map(np.testing.assert_array_equal, values, expected)
            state, metrics = pipeline.step(state, batches()[0])
            np.testing.assert_allclose(metrics.result().loss, next_loss, rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.slow
def test_a_tied_model_does_not_go_on_from_an_untied_one(shards: int, tmp_path: Path) -> None:
    with saved_pipeline("untied", 2) as pipeline:
        saving = RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=1)
        saving.save(pipeline.init(jax.random.key(1)), {})
        saving.checkpoints.close()
    with saved_pipeline("tied", shards) as pipeline:
        saving = RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=1)
        found = saving.checkpoints.newest()
        assert found is not None
        with pytest.raises(ValueError, match=r"has layer head, which this run's model does not have: resume with the"):
            saving.restore(found)
        saving.checkpoints.close()


@pytest.mark.parametrize("tied", [False, True])
def test_an_import_goes_through_shards_and_back_without_a_change(tied: bool, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "theirs", TINY_LLAMA | {"vocab_size": 259, "tie_word_embeddings": tied})
    write_import(plan_import(source), tmp_path / "ours")
    held = open_model(tmp_path / "ours", "the folder")
    shutil.copytree(tmp_path / "ours", tmp_path / "run", ignore=shutil.ignore_patterns("step_*"))
    config = held.sections.model
    assert isinstance(config, LanguageModelConfig)
    with pipeline_of(language_model(config).split_vocabulary(4, 4)) as pipeline:
        where = tmp_path / "run" / held.checkpoints.relative_to(tmp_path / "ours")
        saving = RunSaver(where, pipeline, every=1, minutes=None, keep=1)
        saving.save(saving.start_from(held.checkpoints), {})
        saving.checkpoints.close()
    write_export(plan_export(tmp_path / "run"), tmp_path / "back", shard_bytes=10**9)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    jax.tree.map(np.testing.assert_array_equal, after, before)
