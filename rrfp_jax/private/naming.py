"""What a private name is for and what may take its place, so that a library without it is told of in one sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import NamedTuple


class Private(NamedTuple):
    """Why a private name is used."""

    purpose: str
    instead: str
    """The public name to look for."""


@contextmanager
def naming(library: str, names: Mapping[str, Private]) -> Iterator[None]:
    """Around the import of private names.

    Raises:
        ImportError: where the version that is installed lacks one; says which, and what to look for.
    """
    try:
        yield
    except ImportError as error:
        missing = [missing_name(library, name, names) for name in names if f"'{name}'" in str(error)]
        told = "; ".join(missing) or f"{library} {version(library)}: {error}"
        raise ImportError(
            f"{told}. Until this package has followed, install the versions in its requirements/"
        ) from error


def missing_name(library: str, name: str, names: Mapping[str, Private]) -> str:
    """What to say where a name is gone, or does something else."""
    private = names[name]
    return (
        f"{library} {version(library)} has no private {name} as it is used here, for {private.purpose}; "
        f"look for {private.instead}"
    )
