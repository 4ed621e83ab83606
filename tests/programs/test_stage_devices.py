"""Arrays that pass between the units of a stage and the stage as a whole."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled

from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs import stage_devices
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.program_text import Exchange, exchanges
from rrfp_jax.programs.stage_devices import StageDevices, meeting
from rrfp_jax.runtime import model as hosted
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear


def test_threads_that_take_one_array_apart_at_the_same_time_get_all_of_it() -> None:
    """JAX takes an array apart when its shards are first asked for, and has no lock around that."""
    stage = StageDevices([jax.devices()[:4], jax.devices()[4:8]])
    many = jax.jit(lambda x: [x + number for number in range(50)], out_shardings=stage.sharding())
    counts: set[int] = set()
    interval, barrier = sys.getswitchinterval(), threading.Barrier(4)

    def take_apart(arrays: list[jax.Array]) -> None:
        barrier.wait(60)
        for array in arrays:
            counts.update(len(own.addressable_shards) for own in stage.per_replica(array).values())

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            arrays = jax.block_until_ready(many(np.zeros(8, np.float32)))
            with ThreadPoolExecutor(4) as pool:
                for one in [pool.submit(take_apart, arrays) for _ in range(4)]:
                    one.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert counts == {4}


def on_mesh(mesh: Mesh, *functions: Callable[[jax.Array], jax.Array]) -> Compiled:
    """A program that runs these on each device of a mesh."""

    def run(x: jax.Array) -> list[jax.Array]:
        return [function(x) for function in functions]

    over = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8 * mesh.size,), np.float32)).compile()


def test_all_connections_of_programs_are_met() -> None:
    """Sums over two axes of three, all-to-alls and permutations too."""
    mesh = StageDevices([jax.devices()[:8]], (("tensor", 2), ("context", 2), ("expert", 2))).unit_mesh(0)
    programs = [
        on_mesh(mesh, lambda x: jax.lax.psum(x, ("tensor", "expert"))),
        on_mesh(
            mesh,
            lambda x: jax.lax.ppermute(x, "context", [(0, 1), (1, 0)]),
            lambda x: jax.lax.all_to_all(x, "expert", 0, 0, tiled=True),
            lambda x: jax.lax.all_gather(x, "context", tiled=True),
        ),
        on_mesh(mesh, lambda x: x + 1, lambda x: jax.lax.psum(x, mesh.axis_names)),
    ]
    # on the mesh the innermost axis is the last: expert, context, tensor
    wanted = [
        Exchange("all-to-all", ((0, 4), (1, 5), (2, 6), (3, 7))),
        Exchange("permute", ((0, 2), (1, 3), (4, 6), (5, 7), (2, 0), (3, 1), (6, 4), (7, 5))),
        Exchange("sum", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        Exchange("sum", ((0, 1, 4, 5), (2, 3, 6, 7))),
        Exchange("sum", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ]
    found = exchanges(programs, mesh.size)
    assert sorted(map(comparable, found)) == sorted(map(comparable, wanted))
    met = meeting(mesh, found)
    assert exchanges([met.lower().compile()], mesh.size) == found
    jax.block_until_ready(met())


def comparable(each: Exchange) -> tuple[str, list[tuple[int, ...]]]:
    ordered = each.groups if each.kind == "permute" else [tuple(sorted(group)) for group in each.groups]
    return each.kind, sorted(ordered)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=4,'b'=1] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4,'b'=1] {'a':(2)2}", ((0, 1), (2, 3))),
    ],
)
def test_groups_are_read_however_they_are_written(groups: str, expected: tuple[tuple[int, ...], ...]) -> None:
    class Program:
        def as_text(self) -> str:
            line = f"  %sum = f32[8]{{0}} all-reduce-start(%x), channel_id=3, {groups}, use_global_device_ids=true"
            return f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}"

    assert exchanges([cast(Compiled, Program())], 4) == [Exchange("sum", expected)]


def test_a_pipeline_meets_its_partners_in_all_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[Mesh, list[Exchange]] = {}
    used: dict[Mesh, list[Exchange]] = {}

    def connect(stages: Sequence[StageDevices], programs: Mapping[Mesh, Sequence[Compiled]]) -> None:
        used.update({mesh: exchanges(own, mesh.size) for mesh, own in programs.items()})
        stage_devices.connect(stages, programs)

    def note(mesh: Mesh, own: Sequence[Exchange]) -> Any:
        met[mesh] = list(own)
        return meeting(mesh, own)

    monkeypatch.setattr(hosted, "connect", connect)
    monkeypatch.setattr(stage_devices, "meeting", note)
    chunk = Chunk(
        name="only",
        init=lambda key: {"kernel": jnp.ones((8, 8))},
        apply=lambda params, inputs, leaves, *, key: (jnp.sum(leaves["x"] @ params["kernel"]), jnp.float32(1)),
        leaves=("x",),
        partition=lambda params, axes: {"kernel": PartitionSpec(None, "tensor")},
    )
    process = Process(Layout(num_stages=1, data=2, mesh={"tensor": 2, "fsdp": 2}))
    with Pipeline([chunk], placement=linear(1), optimizer=optax.sgd(0.1), process=process) as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline.prepare({"x": np.ones((2, 2, 8), np.float32)})
    assert met == {mesh: own for mesh, own in used.items() if own}
    groups = {group for own in met.values() for each in own for group in each.groups}
    assert {len(group) for group in groups} == {2}, "nothing was taken for a group of all devices"
    assert {mesh.shape["tensor"] * mesh.shape["fsdp"] for mesh in met} == {4}
    assert {mesh.size for mesh in met} == {4, 8}, "units, and the stage with its replicas"
