"""Every public name is there; names load on first use, so a missing one would only show in a user's hands."""

import importlib
import pydoc
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from rrfp_jax.first_use import FIELDS
from tests.house import public_names


@pytest.mark.parametrize("module", ["rrfp_jax", "rrfp_jax.models", "rrfp_jax.runtime"])
def test_every_public_name_loads(module: str) -> None:
    package = importlib.import_module(module)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = package.Pipelines


@pytest.mark.parametrize("module", ["rrfp_jax", "rrfp_jax.models"])
def test_help_of_a_public_record_tells_its_fields(module: str) -> None:
    package = importlib.import_module(module)
    records = [value for name in package.__all__ if is_dataclass(value := getattr(package, name))]
    told = {record.__name__: pydoc.plain(pydoc.render_doc(record)) for record in records if FIELDS in record.__doc__}
    assert {"rrfp_jax": "Ordering", "rrfp_jax.models": "ExpertsConfig"}[module] in told
    for name, text in told.items():
        assert text.count(FIELDS) == 1
        assert all(f"{field.name}:" in text for field in fields(getattr(package, name)) if field.repr), name


def test_programs_that_start_without_docstrings_load_every_name() -> None:
    code = "import rrfp_jax; assert rrfp_jax.Ordering.__doc__ is None"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True, timeout=120)


def test_a_public_name_means_one_thing_in_the_library() -> None:
    of_commands = {"main", "make_parser"}  # the two functions that the module of every command has
    library = str(Path(__file__).parents[1] / "rrfp_jax")
    doubled = {name: [str(path) for path in paths] for name, paths in public_names([library]).items() if len(paths) > 1}
    assert doubled.keys() <= of_commands, {name: doubled[name] for name in doubled.keys() - of_commands}
