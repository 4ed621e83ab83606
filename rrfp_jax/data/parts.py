"""The two parts of a data set: what is trained on, and what is held out for evaluation, at its end or by a checksum."""

from fractions import Fraction
from typing import Literal
from zlib import crc32

from rrfp_jax.field_rules import Rule

Part = Literal["train", "held_out"]
TRAIN: Part = "train"
HELD_OUT: Part = "held_out"

A_FRACTION = Rule("0 or more, and less than 1", lambda value: 0 <= value < 1)


def num_trained(num: int, held_out: float) -> int:
    """How many of ``num`` items are trained on where such a fraction, rounded up, is held out."""
    return int(num * (1 - Fraction(str(held_out))))


def is_held_out(key: str, fraction: float) -> bool:
    """Whether what this names is kept for evaluation: by its CRC-32 alone, so the same in every run and on every
    machine, whatever else the data holds."""
    return crc32(key.encode(errors="surrogatepass")) < fraction * 2**32


def refuse_nothing_held_out(part: Part, held_out: float) -> None:
    """Raise ValueError where a part is asked for that there is not."""
    if part == HELD_OUT and not held_out:
        raise ValueError("held_out is 0, so nothing is kept for evaluation: give a fraction, for example 0.01")
