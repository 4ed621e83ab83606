"""Arrays of every kind arrive through every transport as the receiving program wants them."""

import gc
import time
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.transports import ArrayEdge
from rrfp_jax.runtime.transports.edges import EdgePlan
from rrfp_jax.runtime.transports.messages import MessageKey, pack_key
from rrfp_jax.runtime.transports.transport import BeginCopy, directly, faster, through_pinned
from tests.cluster.mesh import eventually, traffic
from tests.runtime.transport_pairs import ACTIVATION, connected, spec_of, unit_sharding

PAIR = Layout(num_stages=2, num_ranks=2)
WIDE_PAIR = Layout(num_stages=2, tensor=4, num_ranks=2)
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "int8", "uint16", "int32", "int4"]
each_way = pytest.mark.parametrize("selection", ["sockets", "transfer"])


def single_edge(payload: Any, devices: tuple[int, int] = (0, 1)) -> dict[Any, ArrayEdge]:
    """An edge between two units of one device each."""
    source, target = ([jax.devices()[device]] for device in devices)
    return {
        ACTIVATION[:3]: ArrayEdge(spec=spec_of(payload), source=unit_sharding(source), target=unit_sharding(target))
    }


def same(got: Any, wanted: Any) -> None:
    """The same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def payload_of_everything() -> Any:
    arrays = {name: jnp.arange(-6, 6).astype(name).reshape(3, 4) for name in DTYPES}
    more = {
        "scalar": jnp.float32(1.5),
        "empty": jnp.zeros((0, 7), jnp.bfloat16),
        "medium": jnp.arange(50_000, dtype=jnp.float32).reshape(5, -1),
        "large": jnp.arange(1 << 22, dtype=jnp.float32).reshape(1 << 11, -1),
    }
    return {"arrays": arrays, "nested": (more, [None, (), {"x": jnp.ones((2, 3, 5))}])}


@each_way
@pytest.mark.parametrize("encrypt_arrays", [True, False], ids=["encrypted", "clear"])
def test_every_dtype_size_and_container_arrives(selection: str, encrypt_arrays: bool) -> None:
    payload = jax.device_put(payload_of_everything(), jax.devices()[0])
    with connected(PAIR, single_edge(payload), selection, encrypt_arrays=encrypt_arrays) as ranks:
        ranks.send(0, 1, payload, step=5)
        stage, step, message, got = ranks[1].next()
        assert (stage, step, message) == (1, 5, ACTIVATION)
        same(got, payload)
        for large in (got["nested"][0]["large"], got["nested"][0]["medium"]):
            assert large.__array_interface__["data"][0] % 64 == 0  # so that a program takes it without a copy
        held = [ranks[r].transport for r in (0, 1)]
        assert held[0].held.sent == 0 or eventually(lambda: held[0].held.sent == 0)
        assert held[0].held.peak >= 16 << 20
        assert held[1].held.received == 0


def test_large_arrays_that_arrive_aligned_are_delivered_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    value = jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), jax.devices()[0])
    with connected(PAIR, single_edge(value)) as ranks:
        monkeypatch.setattr("rrfp_jax.runtime.transports.messages.Workers.submit", None)
        addresses = set()
        for step in range(5):
            ranks.send(0, 1, value, step=step)
            got = ranks[1].next()[3]
            same(got, value)
            addresses.add(got.__array_interface__["data"][0])
            del got
        assert len(addresses) < 5  # memory is used again


def test_thousands_of_small_arrays_arrive() -> None:
    """More than the header of one message holds."""
    payload = [np.full(256, i, np.float32) for i in range(2000)]
    with connected(PAIR, single_edge(payload)) as ranks:
        ranks.send(0, 1, payload)
        same(ranks[1].next()[3], payload)


SHARDINGS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "replicated": ((4,), ()),
    "rows": ((4,), ("a",)),
    "columns": ((4,), (None, "a")),
    "rows by 2": ((2, 2), ("a",)),
    "columns by 2": ((2, 2), (None, "b")),
    "both": ((2, 2), ("b", "a")),
}


def sharding_named(name: str, devices: list[jax.Device]) -> Sharding:
    grid, axes = SHARDINGS[name]
    return NamedSharding(Mesh(np.array(devices).reshape(grid), ("a", "b")[: len(grid)]), PartitionSpec(*axes))


@each_way
def test_an_array_arrives_in_the_sharding_that_the_receiver_wants(selection: str) -> None:
    devices = jax.devices()
    value = jnp.arange(8 * 12, dtype=jnp.bfloat16).reshape(8, 12)
    with connected(WIDE_PAIR, edges := {}, selection) as ranks:
        # cutting on the device needs a program for each piece, so only some pairs go by transfer
        for source in SHARDINGS:
            for target in SHARDINGS if selection == "sockets" else ("replicated", "columns by 2"):
                here, there = sharding_named(source, devices[:4]), sharding_named(target, devices[4:])
                edges[ACTIVATION[:3]] = ArrayEdge(spec=spec_of(value), source=here, target=there)
                for rank in ranks.ranks:
                    rank.renew()
                    rank.transport.prepare([ACTIVATION])
                ranks.send(0, 1, jax.device_put(value, here))
                got = ranks[1].next()[3]
                same(got, value)
                program = jax.jit(lambda x: x + 1, in_shardings=there, out_shardings=there)
                same(program.lower(spec_of(value)).compile()(got), value + 1)
                if target != "replicated":
                    assert got.sharding.is_equivalent_to(there, 2)


@pytest.mark.parametrize("way", [directly, through_pinned])
@pytest.mark.parametrize("source", ["replicated", "rows by 2"])
def test_devices_with_memory_of_their_own_are_copied_from_beside_the_loop(
    source: str, way: BeginCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = jax.devices()
    value = {"large": jnp.arange(1 << 16, dtype=jnp.float32).reshape(64, -1), "small": jnp.arange(8.0).reshape(4, 2)}
    here, there = sharding_named(source, devices[:4]), sharding_named("columns by 2", devices[4:])
    monkeypatch.setattr(EdgePlan, "is_source_on_host", False)
    monkeypatch.setattr("rrfp_jax.runtime.transports.transport.faster", lambda *_: way)
    with connected(WIDE_PAIR, {ACTIVATION[:3]: ArrayEdge(spec=spec_of(value), source=here, target=there)}) as ranks:
        ranks.send(0, 1, jax.device_put(value, here))
        same(ranks[1].next()[3], value)


def test_the_faster_way_from_a_device_is_taken_unless_it_fails_or_brings_other_bytes() -> None:
    def slow(shard: Any) -> Any:
        time.sleep(0.02)
        return shard

    def quick(shard: Any) -> Any:
        return shard

    def refused(shard: Any) -> Any:
        raise ValueError("no such memory")

    def wrong(shard: Any) -> Any:
        return shard + 1

    device = jax.devices()[0]
    assert faster(device, slow, quick) is quick
    assert faster(device, quick, slow) is quick
    assert faster(device, slow, refused) is slow
    assert faster(device, slow, wrong) is slow


def test_only_what_a_rank_needs_travels() -> None:
    devices = jax.devices()
    value = jnp.ones((256, 256), jnp.float32)
    for target, num_copies in (("replicated", 1), ("rows", 1), ("rows by 2", 1)):
        edge = ArrayEdge(
            spec=spec_of(value),
            source=sharding_named("replicated", devices[:4]),
            target=sharding_named(target, devices[4:]),
        )
        with connected(WIDE_PAIR, {ACTIVATION[:3]: edge}) as ranks:
            ranks.send(0, 1, jax.device_put(value, edge.source))
            ranks[1].next()
            assert ranks[0].transport.held.peak == num_copies * value.nbytes


def test_within_a_process_arrays_are_handed_over_at_once() -> None:
    devices = jax.devices()
    layout = Layout(num_stages=2)
    value = jax.device_put(jnp.arange(5.0), devices[0])
    with connected(layout, single_edge(value)) as ranks:
        transport = ranks[0].transport
        staged = transport.send_array(value, 1, ACTIVATION)
        transport.send(1, 2, ACTIVATION, staged)
        assert ranks[0].next()[:3] == (1, 2, ACTIVATION)
        assert staged.__array_interface__["data"] == np.asarray(value).__array_interface__["data"]


def test_within_a_process_shardings_may_differ_too() -> None:
    devices = jax.devices()
    value = jnp.arange(48.0).reshape(8, 6)
    source, target = sharding_named("rows", devices[:4]), sharding_named("columns by 2", devices[4:])
    layout = Layout(num_stages=2, tensor=4)
    with connected(layout, {ACTIVATION[:3]: ArrayEdge(spec=spec_of(value), source=source, target=target)}) as ranks:
        ranks.send(0, 1, jax.device_put(value, source))
        got = ranks[0].next()[3]
        assert got.sharding.is_equivalent_to(target, 2)
        same(got, value)


def test_what_stays_in_a_unit_stays_where_it_is() -> None:
    devices = jax.devices()
    value = jnp.arange(48.0).reshape(8, 6)
    rows = sharding_named("rows", devices[:4])
    here = Message(MessageKind.ACTIVATION, 0, 0, 0)
    edge = ArrayEdge(spec=spec_of(value), source=rows, target=rows)
    with connected(Layout(num_stages=1, tensor=4), {here[:3]: edge}) as ranks:
        lying = jax.device_put(value, rows)
        assert ranks[0].transport.send_array(lying, 0, here) is lying


@each_way
def test_messages_may_come_again_and_in_any_order(selection: str) -> None:
    values = [jax.device_put(jnp.full((n,), n, jnp.float32), jax.devices()[0]) for n in (4, 4, 4)]
    with connected(PAIR, single_edge(values[0]), selection) as ranks:
        transport = ranks[0].transport
        messages = [ACTIVATION._replace(microbatch=m) for m in (2, 0, 1)]
        staged = [transport.send_array(value, 1, m) for value, m in zip(values, messages, strict=True)]
        for step, (message, each) in enumerate(zip(reversed(messages), reversed(staged), strict=True)):
            ranks.on_loop(lambda step=step, message=message, each=each: transport.send(1, step, message, each))
        came = sorted(ranks[1].next()[1:3] for _ in messages)
        assert came == sorted(zip(range(3), reversed(messages), strict=True))


def test_small_parts_need_no_transfer() -> None:
    devices = jax.devices()
    small = jax.device_put(jnp.arange(4.0), devices[0])
    large = jax.device_put(jnp.arange(4096.0), devices[0])
    back = Message(MessageKind.GRADIENT, 0, 1, 0)
    edges = single_edge(small) | {back[:3]: single_edge(large)[ACTIVATION[:3]]}
    with connected(PAIR, edges, "transfer", eager_bytes=1000) as ranks:
        staged = [ranks[0].transport.send_array(*each) for each in ((small, 1, ACTIVATION), (large, 1, back))]
        assert [type(each.parts[0][1]).__name__ for each in staged] == ["PackedPart", "_Offer"]
        for value, message in ((small, ACTIVATION), (large, back)):
            ranks.send(0, 1, value, message)
            same(ranks[1].next()[3], value)


@each_way
def test_numpy_arrays_travel_too(selection: str) -> None:
    payload = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((300, 300), ml_dtypes.bfloat16)}
    with connected(PAIR, single_edge(payload), selection) as ranks:
        ranks.send(0, 1, payload)
        same(ranks[1].next()[3], payload)


def test_plain_data_goes_to_the_receiving_unit() -> None:
    report = Message(MessageKind.REPORT, 1, 0)
    shared = Message(MessageKind.SHARED, 0, 1)
    data = {"losses": [[0, 1, 2.5, 8.0]], "nothing": None, "norms": b"\x00\x01"}
    with connected(PAIR, {}) as ranks:
        ranks.send(1, 0, data, report, step=7)
        assert ranks[0].next() == (0, 7, report, data)
        ranks.send(0, 1, None, shared)
        assert ranks[1].next() == (1, 0, shared, None)


def test_a_payload_that_is_not_the_edges_is_refused() -> None:
    value = jax.device_put(jnp.ones((4, 6)), jax.devices()[0])
    with connected(PAIR, single_edge(value)) as ranks:
        send_array = ranks[0].transport.send_array
        for bad, words in (
            ({"x": value}, "structure"),
            (value.astype(jnp.bfloat16), "shapes and dtypes"),
            (value[:2], "shapes and dtypes"),
        ):
            with pytest.raises(ValueError, match=words):
                send_array(bad, 1, ACTIVATION)
    rows = sharding_named("rows", jax.devices()[:4])
    wide = jax.device_put(jnp.ones((4, 8)), sharding_named("columns", jax.devices()[:4]))
    edge = ArrayEdge(spec=spec_of(wide), source=rows, target=sharding_named("rows", jax.devices()[4:]))
    with connected(WIDE_PAIR, {ACTIVATION[:3]: edge}) as ranks, pytest.raises(ValueError, match="lies as"):
        ranks[0].transport.send_array(wide, 1, ACTIVATION)


def test_an_edge_that_does_not_fit_its_units_is_refused() -> None:
    value = jnp.ones((4, 6))
    with connected(WIDE_PAIR, single_edge(value)) as ranks, pytest.raises(ValueError, match="has 4"):
        ranks[0].transport.prepare([ACTIVATION])


@each_way
def test_garbage_is_dropped(selection: str) -> None:
    """Whatever another rank sends, it is dropped or refused, and the next message arrives."""
    value = jax.device_put(jnp.arange(4.0), jax.devices()[0])
    with connected(PAIR, single_edge(value), selection) as ranks:
        network = ranks[0].network
        assert network is not None
        topics = ["part@0"] if selection == "sockets" else ["transfer-offer", "transfer-confirmation"]
        identity = [0, 0, 0, 1, 3]
        for topic in [*topics, "control@0"]:
            for header in (
                {},
                {"k": identity},
                {"k": [0, 0, 0, 9, 3], "d": bytes(16), "n": 1, "c": []},
                {"k": [0, 99, 0, 1, 3], "d": bytes(16), "n": 1, "c": []},
                {"k": identity, "d": bytes(15), "n": -1, "c": []},
                {"k": identity, "d": bytes(17), "n": "x", "c": [7]},
                {"k": identity[:3], "d": bytes(16), "n": 1, "c": [None]},
            ):
                network.on_loop(network.send, 1, topic, header)
        for message in (ACTIVATION, Message(MessageKind.REPORT, 0, 7), Message(MessageKind.REPORT, 1, 0)):
            packed = pack_key(MessageKey(0, message))
            network.call_soon(partial(network.send_arrays, 1, b"control@0", packed, [b"\x01"]))
        network.call_soon(
            partial(
                network.send_arrays,
                1,
                b"control@0",
                pack_key(MessageKey(0, Message(MessageKind.REPORT, 0, 1))),
                [b"\xc1"],
            )
        )
        ranks.send(0, 1, value)
        assert ranks[1].next()[2] == ACTIVATION
        assert ranks[1].none_came()
        receiver = ranks[1].network
        assert receiver is not None
        assert traffic(receiver).num_dropped == (18 if selection == "sockets" else 22)


def test_a_transport_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, sockets, transfer"):
        Process(Layout(num_stages=1), transport="pigeon")  # type: ignore[arg-type]


def test_what_cannot_be_assembled_is_a_failure_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    devices, value = jax.devices(), jnp.ones((1 << 16, 4))
    here, there = sharding_named("replicated", devices[:4]), sharding_named("columns", devices[4:])
    value = jax.device_put(value, here)
    with connected(WIDE_PAIR, {ACTIVATION[:3]: ArrayEdge(spec=spec_of(value), source=here, target=there)}) as ranks:
        monkeypatch.setattr("rrfp_jax.runtime.transports.messages.assemble_message", fail)
        ranks.send(0, 1, value)
        failure = ranks[1].failures.get(timeout=10)
        assert "rank 1" in str(failure)
        assert "out of memory" in str(failure)


@each_way
def test_pipelines_follow_each_other_on_one_network(selection: str) -> None:
    """What is sent before a rank's next transport is there waits for it; late confirmations confuse nobody."""
    value = jax.device_put(jnp.arange(4.0), jax.devices()[0])
    with connected(PAIR, single_edge(value), selection) as ranks:
        for _ in range(3):
            ranks[0].renew()
            ranks[1].transport.close()
            ranks.send(0, 1, value)
            assert ranks[1].none_came()
            ranks[1].renew()
            same(ranks[1].next()[3], value)
        assert ranks[1].none_came()
        assert [traffic(rank.network).num_dropped for rank in ranks.ranks if rank.network is not None] == [0, 0]


@each_way
def test_what_was_worked_out_for_a_pipeline_goes_with_it(selection: str) -> None:
    """Also what is cut and fetched: a process may have many pipelines, one after another, and holds the last one's."""
    value = jax.device_put(jnp.arange(4096.0), jax.devices()[0])
    with connected(PAIR, single_edge(value), selection) as ranks:
        known: list[weakref.ref[EdgePlan]] = []
        for _ in range(3):
            ranks.send(0, 1, value)
            same(ranks[1].next()[3], value)
            known += [weakref.ref(rank.transport._routes.of(ACTIVATION).plan) for rank in ranks.ranks]
            for rank in ranks.ranks:
                rank.renew()
        assert eventually(lambda: gc.collect() >= 0 and not any(plan() for plan in known))
