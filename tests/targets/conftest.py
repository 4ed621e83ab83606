"""These tests compile for accelerators that are not here: ``make test-targets`` makes an environment for each compiler.

``RRFP_TARGET`` names the accelerator. Elsewhere the tests are skipped with a sentence: a compiler takes a gigabyte.
"""

import os

import pytest

from rrfp_jax.costs.devices import Device, device_of
from rrfp_jax.programs.target import devices_for
from rrfp_jax.runtime.start_jax import use_virtual_devices

TARGET = "RRFP_TARGET"


@pytest.fixture(scope="session")
def target() -> Device:
    """The accelerator that programs are compiled for."""
    name = os.environ.get(TARGET)
    if name is None:
        pytest.skip("no accelerator is named to compile for: run make test-targets")
    use_virtual_devices(1)  # as a run that is only compiled does; JAX takes the number before its first array only
    devices_for(name, 1)  # says which package is missing
    return device_of(name)
