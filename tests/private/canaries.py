"""A private name is called on as this package does; where that fails, the message says what to look for."""

import inspect
from collections.abc import Callable, Mapping

import pytest

from rrfp_jax.private import Private, missing_name


def assert_kept(
    library: str, names: Mapping[str, Private], checks: Mapping[str, Callable[[], None]], name: str
) -> None:
    try:
        checks[name]()
    except Exception as error:
        pytest.fail(f"{missing_name(library, name, names)}. It now says {error!r}", pytrace=False)


def assert_takes(function: Callable[..., object], *arguments: object, **options: object) -> None:
    """Whether its signature has room for such a call, which is not made."""
    inspect.signature(function).bind(*arguments, **options)
