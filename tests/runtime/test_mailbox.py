"""The mailbox routes values by their messages, early ones too."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.schedules import Placement, chain

AWAY = Message(MessageKind.ACTIVATION, 0, 1, 4)
HERE = Message(MessageKind.ACTIVATION, 0, 2, 4)


def make_mailbox() -> Mailbox:
    return Mailbox(Placement((0, 1, 0)), 0, lambda value, stage, message, bucket, step: value, chain(3, 1))


def test_a_value_for_another_stage_waits_to_be_sent_once() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    value = np.ones(2)
    mailbox.post(0, AWAY, value)
    assert mailbox.payload(0, AWAY) is value
    with pytest.raises(KeyError):
        mailbox.payload(0, AWAY)


def test_a_value_for_a_chunk_of_the_same_stage_never_leaves() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    value = np.ones(2)
    mailbox.post(0, HERE, value)
    assert mailbox.read(0, HERE) is value
    assert mailbox.take(0, HERE) is value


def test_what_has_arrived_and_was_not_taken_is_counted() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    arriving = Message(MessageKind.GRADIENT, 1, 0, 4)
    mailbox.accept(0, arriving, np.zeros(3, np.float32))
    mailbox.accept(0, Message(MessageKind.REPORT, 1, 0), object())
    mailbox.accept(1, arriving, {"a": np.zeros(2, np.float32), "b": np.zeros((), np.int8)})
    assert mailbox.held_bytes == 12 + 9
    mailbox.take(0, arriving)
    assert mailbox.held_bytes == 9


def test_an_array_on_several_devices_counts_as_its_part_on_one() -> None:
    mailbox, arriving = make_mailbox(), Message(MessageKind.GRADIENT, 1, 0, 4)
    mailbox.begin(0)
    at = NamedSharding(jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2]), PartitionSpec("fsdp"))
    mailbox.accept(0, arriving, jax.device_put(np.zeros((4, 3), np.float32), at))
    assert mailbox.held_bytes == 24


def test_messages_of_a_later_step_wait_and_an_ended_step_is_forgotten() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    arriving = Message(MessageKind.GRADIENT, 1, 0, 4)
    early = np.ones(2)
    mailbox.accept(1, arriving, early)
    mailbox.accept(0, arriving, np.zeros(2))
    mailbox.finish(0)
    mailbox.begin(1)
    mailbox.accept(1, arriving, np.zeros(2))
    mailbox.accept(0, arriving, np.zeros(2))
    assert mailbox.held_bytes == early.nbytes
    assert mailbox.take(1, arriving) is early
