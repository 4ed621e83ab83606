"""The send window: in order, bounded in bytes, and nothing is lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.cluster._channel import OutgoingMessage, SendQueue


def outgoing(number: int, num_bytes: int) -> OutgoingMessage:
    return OutgoingMessage(b"note", str(number).encode(), (), num_bytes, None)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120), st.integers(0, 2**32))
def test_all_messages_go_out_in_order_and_within_the_mark(sizes: list[int], mark: int, seed: int) -> None:
    window, sent, confirmed, chance = SendQueue(mark), [], [], random.Random(seed)
    waiting = [outgoing(i, size) for i, size in enumerate(sizes)]
    while waiting or len(confirmed) < len(sizes):
        if waiting and chance.random() < 0.5:
            sent += window.offer(waiting.pop(0))
        elif len(confirmed) < len(sent):
            done, released = window.confirm(chance.randint(len(confirmed), len(sent)))
            confirmed += done
            sent += released
        out = sent[len(confirmed) :]
        assert window.unconfirmed_bytes == sum(message.num_bytes for message in out)
        assert window.unconfirmed_bytes <= mark or len(out) == 1
    assert [int(message.header) for message in confirmed] == list(range(len(sizes)))
    assert (window.unconfirmed_bytes, window.waiting_bytes) == (0, 0)


@pytest.mark.parametrize("count", [0, 3])
def test_a_receipt_that_cannot_be_is_refused(count: int) -> None:
    window = SendQueue(100)
    for number in range(2):
        window.offer(outgoing(number, 1))
    window.confirm(1)
    with pytest.raises(MalformedMessage, match=f"{count} messages are confirmed, where 1 were and 1 more are out"):
        window.confirm(count)
    assert window.confirm(2)[0][0].header == b"1"
