"""The planner knows that adapters train in place of their layers."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.model_parts import model_flops, training_chunks
from rrfp_jax.costs.devices import device_of
from rrfp_jax.data.dataset import contents_of
from rrfp_jax.models import language_model
from rrfp_jax.planner.analytic_costs import analytic_book, model_layers
from rrfp_jax.programs.chunk import ADAPTERS, param_specs
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.shapes import derive_shapes, num_bytes
from rrfp_jax.programs.state import state_specs
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

ADAPTED = {"adapters.rank": 4, "adapters.targets": ("query", "value", "layers.[01].mlp.*")}


def held(overrides: dict[str, Any]) -> list[int]:
    """Bytes of parameters, accumulators and optimizer state of embedding, layers and head, as programs hold them."""
    config = load_train_config("cpu/debug", overrides)
    counts = [0, *[1] * config.model.num_layers, 0]
    chunks = tuple(training_chunks(config, language_model(config.model).split(layers_per_chunk=counts)))
    optimizer = make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, 10))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    states = [
        state_specs(chunks, index, optimizer, sharding=device, trains=len(chunk.frozen) < len(chunk.init.names))  # type: ignore[attr-defined]
        for index, chunk in enumerate(chunks)
    ]
    return [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vars(each))) for each in states]


@pytest.mark.parametrize("overrides", [{}, ADAPTED], ids=["whole", "adapters"])
def test_forecast_bytes_are_those_held(overrides: dict[str, Any]) -> None:
    model = model_layers(load_train_config("cpu/debug", overrides), microbatch_size=2)
    told = [model.types[name].fixed_bytes for name in model.layers]
    assert told == held(overrides)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("targets", [("query", "value"), ("attention.*", "mlp.*")], ids=str)
@pytest.mark.one_in(3)
def test_bytes_of_a_microbatch_bound_those_of_the_programs(targets: Any, dropout: float, remat: str) -> None:
    config = load_train_config(
        "cpu/debug", {"adapters.rank": 4, "adapters.targets": targets, "adapters.dropout": dropout}
    )
    chunks = training_chunks(config, language_model(config.model).split(4))
    graph = replace(model_graph(chunks, None, None), num_microbatches=2)
    graph = replace(graph, split=frozenset(range(4)))
    leaf = jax.ShapeDtypeStruct((2, config.data.length), np.int32)  # type: ignore[union-attr]
    leaves = {"tokens": leaf, "targets": leaf, "weights": jax.ShapeDtypeStruct(leaf.shape, np.float32)}
    plan = plan_chunk(1, chunks, graph, derive_shapes(chunks, graph, leaves), remat=remat)
    layer = model_layers(config, microbatch_size=2, remat=remat).types["layer (adapters)"]
    assert layer.adapters is not None
    kept = num_bytes((plan.residuals.specs.donated, plan.residuals.specs.saved, plan.residuals.specs.aliased))
    key = 32 if dropout else 0
    assert kept - key <= layer.sizes.stash_bytes + layer.adapters.stash_bytes <= 1.25 * kept
    owed = plan.weight_residuals.num_bytes.total
    assert owed - key <= layer.adapters.owed_bytes <= 1.3 * owed
    if not dropout and remat != "full":
        assert layer.adapters.owed_bytes == owed


def test_layers_with_adapters_are_types_of_their_own() -> None:
    config = load_train_config("cpu/debug", ADAPTED)
    model = model_layers(config, microbatch_size=2)
    first, other = "layer (adapters)", "layer (adapters 2)"
    assert model.layers == ("embedding (frozen, first)", first, first, other, other, "head (frozen)")
    costs = analytic_book(config, device_of("h100"), microbatch_sizes=[2]).at(microbatch_size=2).types
    plain = load_train_config("cpu/debug", {})
    whole = analytic_book(plain, device_of("h100"), microbatch_sizes=[2]).at(microbatch_size=2).types["layer"]
    assert costs[other].gradient_bytes < costs[first].gradient_bytes < whole.gradient_bytes / 4
    assert 0 < costs[other].flops < costs[first].flops < whole.flops
    assert costs[first].forward_ms > whole.forward_ms


def test_operations_of_a_step() -> None:
    """Those of the base without the gradients of its matrices, and three times the adapters' products."""
    config, tokens = load_train_config("cpu/debug", ADAPTED), 4 * 64
    leaf = np.zeros((1, 4, 64), np.int32)
    contents = contents_of({"tokens": leaf, "targets": leaf, "weights": leaf.astype(np.float32)})
    whole, adapted = (model_flops(each)(contents) for each in (load_train_config("cpu/debug", {}), config))
    specs = param_specs(training_chunks(config, language_model(config.model).split(1))[0])
    sizes = {
        is_adapter: sum(
            leaf.size
            for name, layer in specs.items()
            for leaf in jax.tree.leaves(layer)
            if name.startswith(ADAPTERS) == is_adapter and len(leaf.shape) == 2 and "embedding" not in name
        )
        for is_adapter in (False, True)
    }
    head = config.model.vocab_size * config.model.hidden if config.model.tie_embeddings else 0
    assert whole - adapted == 2 * tokens * (sizes[False] + head - 3 * sizes[True])
