"""A message of several parts is delivered once, when all of them are here, in whatever order and however often."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.transports.edges import ArrayEdge, EdgePlan
from rrfp_jax.runtime.transports.messages import HeldBytes, Inbox, MessageKey, Workers

ARRAY = np.arange(24.0, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def plan() -> EdgePlan:
    """Rank 2 of four gets the rows of ranks 0 and 1, and wants all of them."""
    mesh = lambda first: Mesh(np.array(jax.devices()[first : first + 2]), ("tensor",))  # noqa: E731
    edge = ArrayEdge(
        spec=jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype),
        source=NamedSharding(mesh(0), PartitionSpec("tensor")),
        target=NamedSharding(mesh(2), PartitionSpec()),
    )
    return EdgePlan(edge, Layout(num_stages=2, tensor=2, num_ranks=4), 0, 1, rank=2)


@pytest.fixture
def delivered() -> list[Any]:
    return []


@pytest.fixture
def held() -> HeldBytes:
    return HeldBytes()


@pytest.fixture
def inbox(delivered: list[Any], held: HeldBytes) -> Iterator[Inbox]:
    workers = Workers("test", 1, delivered.append)
    yield Inbox(lambda *delivery: delivered.append(delivery), workers, held)
    workers.close(1.0)


def key(step: int) -> MessageKey:
    return MessageKey(step, Message(MessageKind.ACTIVATION, 0, 1, 5))


def rows(sender: int) -> list[np.ndarray]:
    return [ARRAY[2 * sender : 2 * sender + 2]]


def test_each_rank_takes_its_own_rows(plan: EdgePlan) -> None:
    assert set(plan.incoming) == {0, 1}
    assert [slot.within for slots in plan.incoming.values() for slot in slots] == [
        (slice(0, 2), slice(0, 6)),
        (slice(2, 4), slice(0, 6)),
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1, 0)])
def test_parts_come_in_any_order_and_again(
    order: tuple[int, ...], plan: EdgePlan, inbox: Inbox, delivered: list[Any], held: HeldBytes
) -> None:
    for sender in order:
        inbox.add_part(plan, key(3), sender, rows(sender))
    ((unit, step, message, got),) = delivered
    assert (unit, step, message) == (1, *key(3)[:2])
    np.testing.assert_array_equal(got, ARRAY)
    assert held.received == 0
    assert held.peak == ARRAY.nbytes


def test_half_a_message_waits(plan: EdgePlan, inbox: Inbox, delivered: list[Any], held: HeldBytes) -> None:
    inbox.add_part(plan, key(3), 0, rows(0))
    inbox.add_part(plan, key(4), 1, rows(1))
    assert not delivered
    assert held.received == ARRAY.nbytes
    inbox.add_part(plan, key(4), 0, rows(0))
    assert [delivery[1] for delivery in delivered] == [4]


def test_what_is_remembered_of_finished_steps_is_bounded(plan: EdgePlan, inbox: Inbox) -> None:
    for step in range(100):
        for sender in (0, 1):
            inbox.add_part(plan, key(step), sender, rows(sender))
    assert len(inbox._complete) < 10
