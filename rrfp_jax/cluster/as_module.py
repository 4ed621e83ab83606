"""A script that runs a module as ``python -m`` does, but looks into the current folder last.

Usage: ``python -P as_module.py MODULE ARGUMENT...``. ``python -m`` looks into the current folder first, and that folder
is the user's: a file ``queue.py`` there would take the place of Python's own module, in ranks and in processes that the
user does not even know of. A user's module in that folder is still found.
"""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path


def python_module(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in a process of its own."""
    return [sys.executable, "-P", __file__, module, *arguments]


def run_as_module() -> None:
    """Runs the module that the first argument names."""
    root = str(Path(__file__).parents[2])
    if root not in sys.path:  # a checkout that is not installed uses its own code, whatever else is installed
        sys.path.insert(0, root)
        import rrfp_jax.version  # noqa: F401 - from now on all of rrfp_jax is this checkout's

        sys.path.append(sys.path.pop(0))
    with suppress(FileNotFoundError):  # the current folder may be gone
        sys.path.append(os.getcwd())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_as_module()
