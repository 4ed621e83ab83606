"""On devices with memory of their own no thread waits for one: copies are enqueued, and who reads them waits.

Devices are the CPU's here, which the transport takes for others.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.transfer import make_error_array

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.runtime import TaskFailed
from rrfp_jax.runtime.failure import TransportFailed
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.runtime.transports import ArrayEdge
from rrfp_jax.runtime.transports.edges import EdgePlan
from rrfp_jax.runtime.transports.messages import HeldBytes, Inbox, MessageKey
from rrfp_jax.runtime.transports.transfer import TransferServer
from tests.cluster.mesh import eventually
from tests.runtime.test_transports import PAIR, same, sharding_named, single_edge
from tests.runtime.transport_pairs import ACTIVATION, connected, spec_of
from tests.test_pipeline import make_batch, make_pipeline

AT_ONCE: Any = SimpleNamespace(submit=lambda work, done: done(work()))
VALUE = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("edges", "messages"):
        monkeypatch.setattr(f"rrfp_jax.runtime.transports.{module}.is_on_host", lambda sharding: False)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arrays whose values came to the host."""
    array_type = type(jnp.zeros(1))
    value, asked = array_type._value, []
    monkeypatch.setattr(array_type, "_value", property(lambda self: asked.append(self) or value.fget(self)))
    return asked


class Late:
    """An array on its way to a device."""

    def __init__(self, values: Any) -> None:
        self.values, self.waited_for = values, False

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> "Late":
        self.waited_for = True
        return self


def row_plan() -> EdgePlan:
    """Rank 2 of four gets the rows of ranks 0 and 1, and wants all of them."""
    devices = jax.devices()
    mesh = [jax.sharding.Mesh(np.array(devices[at : at + 2]), ("tensor",)) for at in (0, 2)]
    source, target = (
        jax.sharding.NamedSharding(each, jax.sharding.PartitionSpec(*axes))
        for each, axes in zip(mesh, (("tensor",), ()), strict=True)
    )
    return EdgePlan(
        ArrayEdge(spec=spec_of(VALUE), source=source, target=target),
        Layout(num_stages=2, tensor=2, num_ranks=4),
        0,
        1,
        rank=2,
    )


def test_what_has_come_is_delivered_before_it_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Late] = []

    def make(shape: Any, sharding: Any, shard_at: Any) -> Late:
        made.append(Late(shard_at((slice(None),) * len(shape))))
        return made[-1]

    delivered: list[Any] = []
    inbox = Inbox(lambda *delivery: delivered.append(delivery), AT_ONCE, HeldBytes())
    monkeypatch.setattr(jax, "make_array_from_callback", make)
    plan = row_plan()
    for sender in (1, 0):
        inbox.add_part(plan, MessageKey(3, ACTIVATION), sender, [VALUE[4 * sender : 4 * sender + 4]])
    ((_, step, _, payload),) = delivered
    assert (step, payload) == (3, made[0])
    assert not made[0].waited_for
    np.testing.assert_array_equal(made[0].values, VALUE)


def test_pieces_on_devices_are_pasted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that several ranks send by transfer."""
    monkeypatch.setattr("rrfp_jax.runtime.transports.messages._host_shard", None)
    delivered: list[Any] = []
    inbox = Inbox(lambda *delivery: delivered.append(delivery), AT_ONCE, HeldBytes())
    for sender in (1, 0):
        piece = jax.device_put(VALUE[4 * sender : 4 * sender + 4], jax.devices()[2])
        inbox.add_part(plan := row_plan(), MessageKey(3, ACTIVATION), sender, [piece])
    got = delivered[0][3]
    assert got.sharding == plan.edge.target
    same(got, VALUE)


def test_what_is_fetched_is_delivered_before_it_is_here_and_confirmed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = jax.device_put(jnp.arange(4096.0), jax.devices()[0])
    pull, waits = TransferServer.pull, []
    with connected(PAIR, single_edge(value), "transfer") as ranks:
        transport = ranks[0].transport
        arrivals = ranks[1].transport._transfers._arrivals
        submit = arrivals.submit
        monkeypatch.setattr(arrivals, "submit", lambda *job: waits.append(job))
        ranks.send(0, 1, value)
        same(ranks[1].next()[3], value)
        assert transport.held.sent == value.nbytes  # so the sender keeps it
        ranks.on_loop(lambda: submit(*waits[0]))
        assert eventually(lambda: transport.held.sent == 0)

        def fail(self: TransferServer, rank: int, number: int, specs: Any) -> list[Any]:
            pull(self, rank, number, specs)
            return [make_error_array(specs[0], "the connection broke")]

        monkeypatch.setattr(arrivals, "submit", submit)
        monkeypatch.setattr(TransferServer, "pull", fail)
        ranks.send(0, 1, value)
        failure = ranks[1].failures.get(timeout=20)
        assert isinstance(failure, TransportFailed)
        assert "rank 1 could not fetch the activation" in str(failure)
        assert "the connection broke" in str(failure)


@pytest.mark.parametrize(
    ("source", "target"), [("rows", "columns by 2"), ("both", "rows"), ("columns by 2", "replicated")]
)
def test_within_a_process_what_lies_differently_goes_from_device_to_device(
    source: str, target: str, fetched: list[Any]
) -> None:
    devices = jax.devices()
    here, there = sharding_named(source, devices[:4]), sharding_named(target, devices[4:])
    value = {"x": jax.device_put(VALUE, here), "empty": jax.device_put(np.zeros((0, 12), np.float32), here)}
    edge = ArrayEdge(spec=spec_of(value), source=here, target=there)
    with connected(Layout(num_stages=2, tensor=4), {ACTIVATION[:3]: edge}) as ranks:
        ranks.send(0, 1, value)
        got = ranks[0].next()[3]
        assert not fetched
        assert got["x"].sharding == there
        same(got, value)


def test_a_copy_that_fails_ends_the_run_as_a_failure_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Mailbox.take

    def taken(self: Mailbox, step: int, message: Message) -> Any:
        value = take(self, step, message)
        if message.kind is MessageKind.ACTIVATION and message.microbatch == 1:
            return make_error_array(
                jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding), "no memory"
            )
        return value

    monkeypatch.setattr("rrfp_jax.runtime.stage.is_on_host", lambda sharding: False)
    monkeypatch.setattr(Mailbox, "take", taken)
    with make_pipeline() as pipeline:
        _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), make_batch())
        with pytest.raises(TaskFailed) as failure:  # which ends a process with code 4, not as if a peer were lost
            metrics.result()
    assert failure.type is TaskFailed
    assert "a transport failed: what 1F1 reads could not be brought to the devices of stage 1:" in str(failure.value)
    assert "no memory" in str(failure.value)
