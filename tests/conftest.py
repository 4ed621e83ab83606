"""Set up once for every test: eight virtual CPU devices, pinned thread pools, reproducible random examples.

The environment must be complete before JAX is imported for the first time, hence the assignments at module level. The
tests of ``tests/accelerators`` take JAX as it is: ``make test-gpu`` sets ``RRFP_ACCELERATOR``.
"""

import os

NUM_VIRTUAL_DEVICES = 8

if "RRFP_ACCELERATOR" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count")
        ),
        f"--xla_force_host_platform_device_count={NUM_VIRTUAL_DEVICES}",
    ]
)
# XLA sizes its CPU thread pools by this; with the default, long float32 sums change with the number of devices.
os.environ["NPROC"] = str(NUM_VIRTUAL_DEVICES)
# Most of what tests take is compiling, and a quarter of that is spent on making small programs fast. `make test-slow`
# compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Nothing of what tests compile is kept for the user's runs.
os.environ["RRFP_COMPILE_CACHE"] = "none"
# Pictures are drawn into files only.
os.environ["MPLBACKEND"] = "Agg"

from hypothesis import HealthCheck, settings

# No deadlines: shared machines stall now and then. In CI the examples are the same in every run.
settings.register_profile(
    "local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")
