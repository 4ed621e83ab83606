"""The private names of other libraries that this package cannot do without: one file for each library.

No other file imports any. Each file loads its own library only, so the launcher can use that of jaxlib and load no JAX.
Each name has its purpose and the public name that may take its place, so that the error about a version without it is
one useful sentence.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import NamedTuple


class Private(NamedTuple):
    """The reason for the use of a private name."""

    purpose: str
    instead: str
    """The public name to look for."""


@contextmanager
def naming(library: str, names: Mapping[str, Private]) -> Iterator[None]:
    """Wraps the import of private names.

    Raises:
        ImportError: if the version that is installed lacks one; says which, and which public name to look for.
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
    """Returns the sentence about a name that is gone, or does something else."""
    private = names[name]
    return (
        f"{library} {version(library)} has no private {name} as it is used here, for {private.purpose}; "
        f"look for {private.instead}"
    )
