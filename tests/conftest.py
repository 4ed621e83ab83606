"""Set up once for every test: eight virtual CPU devices, pinned thread pools, reproducible random examples.

The environment must be complete before JAX is imported for the first time, hence the assignments at module level. The
tests of ``tests/accelerators`` take JAX as it is: ``make test-gpu`` sets ``RRFP_ACCELERATOR``.
"""

import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

from tests import environment

if "RRFP_ACCELERATOR" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
environment.prepare()
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Pictures are drawn into files only.
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: shared machines stall now and then. In CI the examples are the same in every run.
settings.register_profile(
    "local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


COMPILED_BYTES = 2 << 30
_temporary = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """What tests compile is compiled once, for all workers, ranks and devices, and kept in pytest's cache.

    An entry is found by the whole program and all that it was compiled with; ``--cache-clear`` has all compiled anew.
    """
    if IS_WORKER:
        return
    if config.pluginmanager.has_plugin("cacheprovider"):
        os.environ["RRFP_COMPILE_CACHE"] = str(config.cache.mkdir("compiled"))
    else:
        config.stash[_temporary] = tempfile.TemporaryDirectory(prefix="rrfp-tests-", ignore_cleanup_errors=True)
        os.environ["RRFP_COMPILE_CACHE"] = config.stash[_temporary].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Take two workers more than there are cores: tests that start processes wait for them, and do not compute."""
    return len(os.sched_getaffinity(0)) + 2


ONE_IN = {"test_explore_": 14, "test_groups_explore": 14, "test_reductions": 14}
"""By how the name of a module begins, how many sets of parameters there are for each that the fast tests take."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some tests have many sets of parameters: the fast tests take one in so many of each test, the slow ones the rest.

    That are explorations, which are exhaustive, and tests with the mark ``one_in``.
    """
    numbers: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        of_module = (each for name, each in ONE_IN.items() if item.path.name.startswith(name))
        one_in = next(of_module, 1) if mark is None else mark.args[0]
        kind = item.nodeid.partition("[")[0]
        if numbers[kind] % one_in:
            item.add_marker(pytest.mark.slow)
        numbers[kind] += 1


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    if "jax" in sys.modules:  # the tests that are collected use it
        from rrfp_jax.runtime.compile_cache import use_compile_cache

        use_compile_cache(max_bytes=COMPILED_BYTES)


MOST_MAPPINGS = 20_000
"""Of the 65,530 pieces of memory that Linux lets a process map: each program that is compiled for CPUs takes several,
and where there are no more, the next one ends the process."""


@pytest.fixture(scope="module", autouse=True)
def _programs_of_modules_are_dropped(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    _drop_programs(request)


@pytest.fixture(autouse=True)
def _programs_of_slow_tests_are_dropped(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module of some hundred slow tests compiles more than one process can hold."""
    yield
    if request.node.get_closest_marker("slow") is not None:
        _drop_programs(request)


def _drop_programs(request: pytest.FixtureRequest) -> None:
    """What has been compiled, and what a module keeps in caches of its own, goes, where there is much of it."""
    mappings = Path("/proc/self/maps")
    if "jax" not in sys.modules or not mappings.exists() or mappings.read_bytes().count(b"\n") < MOST_MAPPINGS:
        return
    for kept in vars(request.module).values():
        if isinstance(kept, _lru_cache_wrapper):
            kept.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()


def pytest_collection_finish() -> None:
    """Leave what collecting the tests has made, which lives to the end, out of the search for garbage.

    JAX makes many objects that live long, so whole searches are frequent by default, and take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 50)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _temporary in config.stash:
        config.stash[_temporary].cleanup()
