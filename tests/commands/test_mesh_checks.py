"""Meshes that do not fit model or data are refused in one sentence, before JAX is loaded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.cluster.rendezvous import JoinRequest, Member, configuration_differences
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import check_meshes, plan_run
from rrfp_jax.models import ExpertsConfig

EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2)


def refused(message: str, preset: str = "cpu/debug", *, experts: ExpertsConfig | None = None, **overrides: Any) -> None:
    config = load_train_config(preset, {name.replace("__", "."): value for name, value in overrides.items()})
    config = replace(config, model=replace(config.model, experts=experts))
    with pytest.raises(ValueError, match=message):
        check_meshes(config)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": 3}, r"^num_heads 4 does not divide over tensor 3: give a tensor degree that divides 4, or .* 6$"),
        ({"expert": 8}, r"^experts.num_experts 4 does not divide over expert 8: give a degree of expert that divides"),
        ({"tensr": 2}, r"^mesh has an axis 'tensr', over which nothing .* did you mean tensor\? take "),
        ({"fsdp": 3}, r"^a microbatch has 4 rows .* do not divide over fsdp 3: give batch_size 48, fewer microbatches"),
        ({"fsdp": 2, "expert": 4}, r"do not divide over fsdp 2 x expert 4: give batch_size 64"),
        ({"context": 3}, r"^length 128 does not divide over context 3: give length 129, or a size of context that"),
    ],
)
def test_what_does_not_divide_is_refused(mesh: dict[str, int], message: str) -> None:
    refused(message, experts=EXPERTS, pipeline__mesh=mesh)


def test_axes_of_one_device_cut_nothing() -> None:
    config = load_train_config("cpu/debug", {"pipeline.mesh": {"whatever": 1, "tensor": 2, "context": 2, "fsdp": 2}})
    check_meshes(config)


def test_an_encoder_has_a_mesh_of_its_own() -> None:
    mesh = {"pipeline__encoder_mesh": {"tensor": 7}, "pipeline__mesh": {"tensor": 1}}
    refused(r"^vision.mlp_dim \d+ does not divide over tensor 7", "cpu/multimodal", **mesh)
    refused(r"^encoder_mesh has an axis 'row'", "cpu/multimodal", pipeline__encoder_mesh={"row": 2})


def test_a_run_is_refused_before_jax_is_loaded(tmp_path: Path) -> None:
    config = load_train_config("cpu/debug", {"pipeline.mesh": {"fsdp": 3}})
    with pytest.raises(ValueError, match="a microbatch has 4 rows"):
        plan_run(config, tmp_path / "run")
    program = "import sys, rrfp_jax.commands.training.planned; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ranks_whose_meshes_differ_in_the_order_of_axes_do_not_agree(tmp_path: Path) -> None:
    """A dictionary is equal to one of another order, but these are other devices along an axis."""
    told = {}
    for rank, mesh in enumerate(({"fsdp": 2, "tensor": 2}, {"tensor": 2, "fsdp": 2})):
        config = load_train_config("cpu/debug", {"pipeline.mesh": mesh, "pipeline.num_stages": 1})
        hello = JoinRequest.of(Member(rank=rank, host="host", pid=1, address={}), 2, plan_run(config, tmp_path).agreed)
        told[rank] = hello.configuration
    assert configuration_differences(told) == [
        'pipeline.mesh is [["fsdp", 2], ["tensor", 2]] on rank 0, [["tensor", 2], ["fsdp", 2]] on rank 1'
    ]
    assert configuration_differences({0: told[0], 1: told[0]}) == []


def test_tensor_behind_another_axis_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for mesh, count in (({"tensor": 2, "fsdp": 2}, 0), ({"expert": 1, "tensor": 2}, 0), ({"fsdp": 2, "tensor": 2}, 1)):
        caplog.clear()
        check_meshes(load_train_config("cpu/debug", {"pipeline.mesh": mesh}))
        assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
            "mesh names tensor after fsdp"
        ] * count
