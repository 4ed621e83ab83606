"""The mailbox routes values by their messages, early ones too."""

import pytest

from rrfp_jax.arbitration import Message, MessageKind
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.tasks import Placement

AWAY = Message(MessageKind.ACTIVATION, 0, 1, 4)
HERE = Message(MessageKind.ACTIVATION, 0, 2, 4)


def make_mailbox() -> Mailbox:
    return Mailbox(Placement((0, 1, 0)), 0, lambda value, stage: (value, stage))


def test_a_value_for_another_stage_waits_to_be_sent_once() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    mailbox.post(0, AWAY, "y")
    assert mailbox.payload(0, AWAY) == ("y", 1)
    with pytest.raises(KeyError):
        mailbox.payload(0, AWAY)


def test_a_value_for_a_chunk_of_the_same_stage_never_leaves() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    mailbox.post(0, HERE, "y")
    assert mailbox.read(0, HERE) == ("y", 0)
    assert mailbox.take(0, HERE) == ("y", 0)


def test_messages_of_a_later_step_wait_and_an_ended_step_is_forgotten() -> None:
    mailbox = make_mailbox()
    mailbox.begin(0)
    arriving = Message(MessageKind.GRADIENT, 1, 0, 4)
    mailbox.accept(1, arriving, "early")
    mailbox.accept(0, arriving, "now")
    mailbox.finish(0)
    mailbox.begin(1)
    assert mailbox.take(1, arriving) == "early"
