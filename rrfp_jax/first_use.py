"""Packages whose names load on first use, so that importing one of their modules does not load JAX.

The names stand once, in the package's stub (``__init__.pyi``), as ordinary imports: ``from rrfp_jax.schedules import
Task as Task``. Type checkers and editors read the stub as it is; here it tells which module to load for a name.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def load_on_first_use(package: str, init_file: str) -> tuple[Callable[[str], Any], list[str]]:
    """The ``__getattr__`` and the ``__all__`` of a package with a stub, given its ``__name__`` and ``__file__``."""
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    module_of_name = {alias.name: statement.module for statement in imports for alias in statement.names}

    def load(name: str) -> Any:
        module = module_of_name.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module), name)

    return load, sorted(module_of_name)
