"""These tests run on whatever JAX finds, and are about accelerators: elsewhere they are skipped with a sentence.

``RRFP_STAND_IN=cpu`` runs them on a CPU device instead, to try the tests themselves.
"""

import os

import pytest

from rrfp_jax.commands.common.process import start_alone
from rrfp_jax.exit_codes import BAD_INPUT

STAND_IN = "RRFP_STAND_IN"


@pytest.fixture(scope="session", autouse=True)
def accelerator() -> str:
    """The platform under test: ``gpu``, ``tpu`` or the stand-in."""
    import jax

    if STAND_IN not in os.environ:
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # processes under test share the GPU with this one
        try:
            start_alone(None)
        except ValueError as error:
            pytest.exit(f"error: {error}", returncode=BAD_INPUT)
    platform = jax.default_backend()
    if platform != os.environ.get(STAND_IN) and platform == "cpu":
        pytest.skip("JAX finds no accelerator here: run make test-gpu or make test-tpu on a machine that has one")
    return platform
