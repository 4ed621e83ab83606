"""The last message of a process on stderr, before it ends at once."""

import sys
from contextlib import suppress

from rrfp_jax.bounded_text import printable


def say_last_words(text: str) -> None:
    """Write ``text``, if any, to stderr, after what stdout still holds; either may be closed, or read by nobody.

    In one piece, since other threads may be writing too.
    """
    with suppress(OSError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"{printable(text)}\n" if text else "")
        sys.stderr.flush()
