"""What groups of processes train, in every layout, is what the plain loop trains; in deterministic mode bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.programs.chunk import whole_layers
from tests.long_sums import make_pipeline, train
from tests.multiprocess.cases import Case, train_together
from tests.multiprocess.models import DRAWN, EXPERTS, LONG_SUMS, RAGGED, train_reference
from tests.plain_loop import assert_same_training

PROPOSE, SHARDED = {"group_protocol": "propose"}, {"shard_optimizer": True}
SPLIT = {"hint": "bfw", "window": 2}
LEFT_OUT = ((0, 2), (0, 3), (0, 7), (1, 0), (1, 3))
FUSED, SPLIT_TABLE = {"schedule": "1f1b"}, {"schedule": "zb-h1"}
ONE_OF_EACH = [
    Case(name="tensor 2", cut=(1, 1), num_stages=2, tensor=2, num_ranks=4, transport="transfer", options=PROPOSE),
    Case(name="4 stages", cut=(0, 1, 1, 0), num_stages=4, num_ranks=4),
    Case(
        name="2 stages on each of 2", cut=(0, 1, 1, 0), num_stages=4, num_ranks=2, transport="transfer", options=SPLIT
    ),
    Case(name="data 2", cut=(1, 1), num_stages=2, data=2, num_ranks=4, options=SHARDED),
    Case(
        name="foresight",
        cut=(1, 1),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        options={"schedule": "zb-h1"},
        delay_ms=8.0,
    ),
    Case(
        name="pairs",
        cut=(1, 1),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        options={"schedule": "zb-h1", "dispatch_ahead": "pairs"},
    ),
    Case(name="by messages", cut=(1, 1), num_stages=2, data=2, num_ranks=4, options={"reduce": "messages"}),
    Case(name="2 x 2 x 2", cut=(1, 1), num_stages=2, data=2, mesh={"fsdp": 2}, num_ranks=4),
]
LONG = Case(
    name="long sums on 3",
    model=LONG_SUMS,
    cut=(1, 1, 1),
    num_stages=3,
    num_ranks=3,
    options={"deterministic": True, "hint": "f-priority"},
)
TURNED = replace(LONG, name="long sums on 3, turned", order=(2, 0, 1))
IN_OTHER_ORDERS = [
    TURNED,
    Case(name="turned", cut=(1, 1, 1, 1), num_stages=4, num_ranks=4, order=(2, 0, 3, 1), options={"schedule": "1f1b"}),
    Case(name="turned 2 on 2", cut=(1, 1, 1, 1), num_stages=4, num_ranks=2, order=(3, 0, 2, 1), transport="transfer"),
    Case(name="data, turned", cut=(1, 1), num_stages=2, data=2, num_ranks=4, order=(1, 2, 3, 0), options=SHARDED),
    Case(
        name="data, turned, by messages",
        cut=(1, 1),
        num_stages=2,
        data=2,
        num_ranks=4,
        order=(1, 2, 3, 0),
        options={"reduce": "messages"},
    ),
    Case(
        name="one replica and two",
        cut=(1, 1),
        num_stages=2,
        data=2,
        replicas=(1, 2),
        num_ranks=3,
        transport="transfer",
        options={"reduce": "messages", "schedule": "1f1b"},
    ),
    Case(name="tensor 2, turned", cut=(1, 1), num_stages=2, tensor=2, num_ranks=4, order=(2, 3, 0, 1), options=PROPOSE),
]
OTHER_MODELS = [
    Case(
        name="tied, by messages",
        model="tied",
        cut=(1, 1),
        num_stages=2,
        data=2,
        tensor=2,
        num_ranks=4,
        options={"reduce": "messages", "hint": "bfw"},
    ),
    Case(
        name="inside layers",
        model=EXPERTS,
        cut=(0.5, 1, 0.5, 1),
        num_stages=4,
        num_ranks=4,
        options={"hint": "bfw", "remat": "full"},
    ),
    Case(
        name="slices",
        model="tied",
        cut=(1, 1, 1, 1),
        slices=3,
        num_stages=4,
        num_ranks=4,
        transport="transfer",
        options={"hint": "bf-deep", "backward": "split"},
    ),
    Case(
        name="slices of two chunks",
        model="tied",
        cut=(1, 1, 1, 1),
        slices=2,
        num_stages=2,
        tensor=2,
        num_ranks=4,
        options={"hint": "bf-deep", "window": 3},
    ),
    Case(
        name="weight gradients left out",
        cut=(1, 1),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        left_out=LEFT_OUT,
        options={"schedule": "zb-h1"},
    ),
    Case(
        name="weight gradients left out, by messages",
        cut=(1, 1),
        num_stages=2,
        data=2,
        num_ranks=4,
        left_out=LEFT_OUT,
        options={"reduce": "messages", "hint": "bfw"},
    ),
    Case(name="passes on", cut=(0, 1, 1, 0), frozen=("layers.0",), num_stages=4, num_ranks=4, options=SPLIT),
    Case(
        name="forwards only",
        cut=(1, 1),
        frozen=("embedding", "layers.0"),
        num_stages=2,
        data=2,
        num_ranks=4,
        options=SHARDED,
    ),
]
MANY_SHAPES = [
    Case(name="encoders together", model=RAGGED, stage_of_chunk=(0, 0, 1, 2, 3), num_stages=4, num_ranks=4),
    Case(
        name="encoders frozen",
        model=RAGGED,
        stage_of_chunk=(0, 1, 2, 2, 3),
        frozen=("image", "sound"),
        num_stages=4,
        num_ranks=4,
        num_steps=20,
        transport="transfer",
        options={"schedule": "zb-h1", "consume": "strict"},
    ),
    Case(
        name="encoders with the decoder",
        model=RAGGED,
        stage_of_chunk=(0, 1, 0, 1, 1),
        num_stages=2,
        data=2,
        num_ranks=4,
        num_steps=20,
        options=SPLIT | SHARDED,
    ),
    Case(
        name="all but the merging layer frozen",
        model=RAGGED,
        stage_of_chunk=(0, 0, 0, 1, 1),
        frozen=("image", "sound", "layer", "head"),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        options={"schedule": "1f1b"},
    ),
]
VISION = [
    Case(
        name="a stage for each",
        model=DRAWN,
        stage_of_chunk=(0, 1, 2),
        num_stages=3,
        num_ranks=3,
        num_steps=20,
        options={"schedule": "zb-h1"},
    ),
    Case(
        name="replicas",
        model=DRAWN,
        stage_of_chunk=(0, 1, 1),
        num_stages=2,
        data=2,
        num_ranks=4,
        num_steps=20,
        transport="transfer",
        options=SHARDED,
    ),
    Case(
        name="the projector alone",
        model=DRAWN,
        stage_of_chunk=(0, 1, 0),
        frozen=("vision", "decoder"),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        num_steps=20,
        options=SPLIT,
    ),
    Case(
        name="an encoder on a mesh of its own",
        model=DRAWN,
        stage_of_chunk=(0, 1, 1),
        mesh=[{"fsdp": 2}, {"tensor": 2}],
        num_stages=2,
        num_ranks=4,
        num_steps=20,
        options={"schedule": "zb-h1"},
    ),
]
VOCABULARY = [
    Case(
        name="tied shards on 4",
        model="tied",
        num_shards=4,
        cut=(1, 1, 1, 1),
        stage_of_chunk=(0, 1, 2, 3, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 3),
        num_stages=4,
        num_ranks=4,
        options={"hint": "bfw", "window": 6},
    ),
    Case(
        name="shards on 2, tensor 2",
        model="untied",
        num_shards=2,
        cut=(1, 1),
        stage_of_chunk=(0, 1, 0, 1, 0, 1, 1),
        num_stages=2,
        tensor=2,
        num_ranks=4,
        transport="transfer",
        options={"deterministic": True},
    ),
]
FORESIGHT = {"deterministic": True, "schedule": "zb-h1"}


OFFLOADED = [
    Case(name=f"{name} {slots}", cut=(1, 1), num_stages=2, tensor=2, num_ranks=4, transport=way, options=options)
    for name, consume, way, most in (("gpipe", "ready", "sockets", 3), ("1f1b", "strict", "transfer", 1))
    for slots in (0, most)
    for options in [{"schedule": name, "consume": consume, "offload": slots, "deterministic": True}]
]


def same_as_one_process(case: Case, result: tuple[list[float], Any]) -> None:
    """Bit for bit, though this process has other devices and runs in another order."""
    options = case.options | {"hint": "fb", "data": case.data, "schedule": None}
    losses, params = train(make_pipeline(**options, placement=case.placement), case.num_steps)
    assert result[0] == losses
    jax.tree.map(np.testing.assert_array_equal, result[1], params)


@pytest.mark.parametrize(
    ("cases", "others"),
    [(ONE_OF_EACH[:1], OTHER_MODELS[-1:]), pytest.param(ONE_OF_EACH, OTHER_MODELS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_one_layout_of_each_kind(cases: list[Case], others: list[Case], tmp_path: Path) -> None:
    results = train_together([*cases, *others, LONG, TURNED], tmp_path)
    reference = train_reference(cases[0])
    for case in cases:
        assert_same_training(*results[case.name], *reference)
    for case in others:
        assert_same_training(*results[case.name], *train_reference(case))
    same_as_one_process(LONG, results[LONG.name])
    same_as_one_process(TURNED, results[TURNED.name])


@pytest.mark.slow
def test_stages_may_lie_on_devices_in_any_order(tmp_path: Path) -> None:
    results = train_together(sorted(IN_OTHER_ORDERS, key=lambda case: -case.num_ranks), tmp_path)
    for case in IN_OTHER_ORDERS[1:]:
        assert_same_training(*results[case.name], *train_reference(case))


@pytest.mark.slow
def test_a_vocabulary_in_shards_on_all_stages(tmp_path: Path) -> None:
    results = train_together(VOCABULARY, tmp_path)
    for case in VOCABULARY:
        losses, params = results[case.name]
        assert_same_training(losses, whole_layers(params), *train_reference(case))


@pytest.mark.slow
def test_microbatches_of_many_shapes_with_and_without_images(tmp_path: Path) -> None:
    results = train_together(MANY_SHAPES, tmp_path)
    for case in MANY_SHAPES:
        assert_same_training(*results[case.name], *train_reference(case))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_vision_language_model_on_drawn_words(tmp_path: Path) -> None:
    cases = sorted(VISION, key=lambda case: -case.num_ranks)
    results = train_together(cases, tmp_path)
    for case in cases:
        assert_same_training(*results[case.name], *train_reference(case))


@pytest.mark.slow
def test_two_hundred_random_steps_of_many_shapes(tmp_path: Path) -> None:
    cases = [replace(case, num_steps=200) for case in MANY_SHAPES[:3]]
    results = train_together(cases, tmp_path)
    for case in cases:
        losses, params = train_reference(case)
        np.testing.assert_allclose(results[case.name][0], losses, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), results[case.name][1], params)


def language_models(case: Case, *more_options: dict[str, Any]) -> list[Case]:
    """The case with a language model of four layers and both transports, tied and untied by turns."""
    cuts = {4: (1, 1, 1, 1), 2: (2, 2)}
    options = [case.options | more for more in more_options or ({},)]
    made = [(transport, more) for transport in ("sockets", "transfer") for more in options]
    return [
        replace(
            case,
            name=f"{transport} {number}",
            model=("tied", "untied")[number % 2],
            cut=cuts[len(case.cut)],
            transport=transport,
            options=more,
        )
        for number, (transport, more) in enumerate(made)
    ]


def on_mesh(mesh: dict[str, int] | list[dict[str, int]], model: str = "untied") -> list[Case]:
    """Stages of four devices over four processes, twenty steps: strictly and ready with foresight, fused and split.

    Four rows make every mesh cut them.
    """
    case = Case(name="", model=model, cut=(1, 1), num_stages=2, mesh=mesh, num_ranks=4, num_steps=20, num_rows=4)
    strict = {"consume": "strict"}
    return [
        replace(case, name="strict, fused", model=model if model == EXPERTS else "tied", options=FUSED | strict),
        replace(case, name="strict, split", transport="transfer", options=SPLIT_TABLE | strict),
        replace(case, name="ready, fused", transport="transfer", options=FUSED),
        replace(case, name="ready, split", options=SPLIT_TABLE | PROPOSE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        language_models(Case(name="", cut=(0,) * 4, num_stages=4, num_ranks=4)),
        language_models(Case(name="", cut=(0,) * 4, num_stages=4, num_ranks=2), {}, SPLIT),
        language_models(Case(name="", cut=(0,) * 4, num_stages=2, num_ranks=2), {}, SPLIT),
        language_models(Case(name="", cut=(0,) * 2, num_stages=2, tensor=2, num_ranks=4), {}, PROPOSE, PROPOSE | SPLIT),
        language_models(Case(name="", cut=(0,) * 2, num_stages=2, data=2, num_ranks=4), {}, SHARDED, SHARDED | SPLIT),
        language_models(
            Case(name="", cut=(0,) * 2, num_stages=2, data=2, tensor=2, num_ranks=8),
            SHARDED,
            PROPOSE,
            PROPOSE | SHARDED,
        ),
        language_models(Case(name="", cut=(0,) * 4, num_stages=2, data=2, tensor=2, num_ranks=4), {}, SHARDED),
    ],
    ids=[
        "4 stages on 4",
        "2 stages on each of 2",
        "2 chunks on each of 2",
        "tensor 2 on 4",
        "data 2 on 4",
        "2 x 2 x 2 on 8",
        "2 x 2 x 2 on 4, 2 chunks each",
    ],
)
def test_every_layout_trains_what_the_plain_loop_trains(cases: list[Case], tmp_path: Path) -> None:
    same_as_the_plain_loop(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "cases",
    [
        on_mesh({"tensor": 2, "fsdp": 2}),
        on_mesh({"fsdp": 4}),
        on_mesh({"expert": 2, "fsdp": 2}),
        on_mesh({"context": 2, "tensor": 2}),
        on_mesh({"expert": 2, "fsdp": 2}, EXPERTS),
        on_mesh([{"fsdp": 2, "expert": 2}, {"tensor": 2, "context": 2}]),
    ],
    ids=[
        "tensor 2 x fsdp 2",
        "fsdp 4",
        "expert 2 x fsdp 2",
        "context 2 x tensor 2",
        "experts",
        "another on each stage",
    ],
)
def test_every_mesh_trains_what_the_plain_loop_trains(cases: list[Case], tmp_path: Path) -> None:
    same_as_the_plain_loop(cases, tmp_path)


def same_as_the_plain_loop(cases: list[Case], tmp_path: Path) -> None:
    results = train_together(cases, tmp_path)
    references = {case.model: train_reference(case) for case in cases}
    for case in cases:
        assert_same_training(*results[case.name], *references[case.model])


@pytest.mark.slow
def test_every_number_of_processes_computes_the_same_bits(tmp_path: Path) -> None:
    twice = replace(LONG, data=2, num_steps=100)
    cases = [
        replace(twice, name="twice on 6", num_ranks=6),
        replace(twice, name="twice on 3", num_ranks=3, options=LONG.options | {"hint": "bfw"}),
        replace(twice, name="twice on 2", num_ranks=2, transport="transfer"),
        replace(twice, name="twice, shared, on 6", num_ranks=6, options=LONG.options | SHARDED),
        replace(LONG, name="once on 3", num_steps=100),
        replace(LONG, name="foresight on 3", options=FORESIGHT, delay_ms=5.0),
        replace(LONG, name="once on 1", num_steps=100, num_ranks=1),
        replace(LONG, name="four times on 4", num_stages=1, data=4, num_ranks=4),
        replace(LONG, name="four times on 2", num_stages=1, data=4, num_ranks=2, transport="transfer"),
    ]
    results = train_together(cases, tmp_path)
    for case in cases:
        same_as_one_process(case, results[case.name])


@pytest.mark.slow
def test_a_group_moves_activations_to_the_host_and_back(tmp_path: Path) -> None:
    """Each process its own shards, beside the tasks that it runs together with the others; no bit changes."""
    results = train_together(OFFLOADED, tmp_path)
    for plain, moved in zip(OFFLOADED[::2], OFFLOADED[1::2], strict=True):
        assert results[moved.name][0] == results[plain.name][0]
        jax.tree.map(np.testing.assert_array_equal, results[moved.name][1], results[plain.name][1])
        assert_same_training(*results[moved.name], *train_reference(moved))
