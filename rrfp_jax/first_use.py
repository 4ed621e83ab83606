"""Packages whose names load on first use, so that importing one of their modules does not load JAX.

The names stand once, in the package's stub (``__init__.pyi``), as ordinary imports: ``from rrfp_jax.schedules import
Task as Task``. Type checkers and editors read the stub as it is; here it tells which module to load for a name.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

FIELDS = "Fields:"
"""Line of a record's docstring behind which its fields are told."""


def load_on_first_use(
    package: str, init_file: str, *, shows_fields: bool = False
) -> tuple[Callable[[str], Any], list[str]]:
    """Returns ``__getattr__`` and ``__all__`` of a package with a stub, given its ``__name__`` and ``__file__``.

    With ``shows_fields`` the docstrings of its records tell their fields, for ``help()``.
    """
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    module_of_name = {alias.name: statement.module for statement in imports for alias in statement.names}

    def load(name: str) -> Any:
        module = module_of_name.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        if shows_fields and isinstance(value, type) and is_dataclass(value):
            _show_fields(value)
        return value

    return load, sorted(module_of_name)


@cache  # each access to a name loads it again; the docstring grows once
def _show_fields(record: type) -> None:
    """Appends the texts below the fields of a record to its docstring.

    Python drops strings below fields when it compiles a class, so they are read from its source. Without source, or
    without docstrings (``python -OO``), the record stays as it is.
    """
    try:
        source = Path(sys.modules[record.__module__].__file__ or "").read_text(encoding="utf-8")
    except OSError:
        return
    # one pass over the file: inspect.getsource takes several
    classes = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)}
    texts = []
    for field, below in pairwise(classes[record.__name__].body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts.append(f"    {name}:\n{indent(inspect.cleandoc(text), ' ' * 8)}\n")
    if record.__doc__ and texts:
        record.__doc__ = "\n".join([inspect.cleandoc(record.__doc__), "", FIELDS, *texts])
