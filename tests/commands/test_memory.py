"""What is freed is kept for the next array where a command says so, unless the environment does."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, threading
import numpy as np
from rrfp_jax.commands.common.process import keep_freed_blocks

keep_freed_blocks()

def touch(times):
    for _ in range(times):
        np.empty(48 << 20, np.uint8).fill(1)

def in_thread(times):
    thread = threading.Thread(target=touch, args=(times,))
    thread.start()
    thread.join()

in_thread(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_thread(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * (48 << 20) // os.sysconf("SC_PAGE_SIZE")


def faults(**environment: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    words = [sys.executable, "-c", FAULTS]
    return int(subprocess.run(words, env=own | environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these bounds")
def test_arrays_that_follow_each_other_take_the_same_pages() -> None:
    assert faults() < 0.1 * PAGES


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has these bounds")
def test_what_the_environment_says_stays() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_=str(1 << 20), NUMPY_MADVISE_HUGEPAGE="0") > 0.9 * PAGES
