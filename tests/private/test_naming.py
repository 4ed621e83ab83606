"""Private names stand in ``rrfp_jax/private`` alone, and one that is gone is told of in a sentence."""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from rrfp_jax.private import Private, naming
from tests.private.canaries import assert_kept

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "rrfp_jax" / "private"
LIBRARIES = ("chex", "flax", "jax", "jaxlib", "optax", "orbax")
NAMES = {"no_such_name": Private("nothing at all", "jax.a_public_one")}


def private_modules(source: str) -> Iterator[str]:
    """What a file imports, or reaches by attributes, that these libraries do not promise to keep."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            reached = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            reached = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            reached = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            reached = [node.value]  # for importlib
        else:
            continue
        for name in reached:
            library, *inner = name.split(".")
            if library == "jaxlib":
                is_private = bool(inner) or not isinstance(node, ast.Constant)
            else:
                is_private = any(part.startswith("_") and part[1:2] != "_" for part in inner)
            if library in LIBRARIES and is_private:
                yield name


def test_no_other_file_takes_a_private_name():
    files = [path for room in ("rrfp_jax", "experiments") for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if not path.is_relative_to(ROOM) and (names := sorted(set(private_modules(path.read_text(encoding="utf-8")))))
    }
    assert found == {}, "move the name to rrfp_jax/private, with what it is for and what may take its place"
    assert {path.name for path in ROOM.glob("*_names.py") if list(private_modules(path.read_text()))} == {
        "jax_names.py",
        "jaxlib_names.py",
        "orbax_names.py",
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from jax._src import distributed", ["jax._src.distributed"]),
        ("import jaxlib", ["jaxlib"]),
        ("def f():\n from jaxlib.xla_client import Client", ["jaxlib.xla_client.Client"]),
        ("import orbax.checkpoint._src.handlers as h", ["orbax.checkpoint._src.handlers"]),
        ("import jax\njax._src", ["jax._src"]),
        ("import_module('jax._src.core')", ["jax._src.core"]),
        ("import jax.numpy as jnp\nfrom orbax.checkpoint import future\njax.__version__\nversion('jaxlib')", []),
    ],
)
def test_what_counts_as_private(source: str, found: list[str]):
    assert list(private_modules(source)) == found


def test_a_name_that_is_gone_is_told_of_in_a_sentence():
    told = f"jax {version('jax')} has no private no_such_name as it is used here, for nothing at all; look for "
    with pytest.raises(ImportError) as caught, naming("jax", NAMES):
        from jax._src.distributed import no_such_name  # noqa: F401
    assert str(caught.value).startswith(f"{told}jax.a_public_one. Until this package has followed, install")
    with pytest.raises(ImportError, match=r"No module named 'jax\._src\.no_such_module'"), naming("jax", NAMES):
        import jax._src.no_such_module  # noqa: F401


def test_a_canary_says_the_same():
    def gone() -> None:
        raise TypeError("unexpected argument")

    with pytest.raises(
        pytest.fail.Exception, match=r"jax .* has no private no_such_name .* look for jax\.a_public_one"
    ):
        assert_kept("jax", NAMES, {"no_such_name": gone}, "no_such_name")
