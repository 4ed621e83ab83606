"""Units and stages whose devices belong to two processes compute what the plain loop computes."""

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.environment import of_child
from tests.multiprocess.programs_child import CASES
from tests.plain_loop import assert_same_training
from tests.programs.test_grids import trained_plainly

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses and parameters by case, of both processes."""
    files = [tmp_path_factory.mktemp("two_processes") / f"{rank}.pickle" for rank in range(2)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = of_child() | {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "2", "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.programs_child", str(rank), coordinator, str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(outputs)
    return [pickle.loads(file.read_bytes()) for file in files]


@pytest.fixture(scope="module")
def reference() -> Any:
    return trained_plainly()


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_two_processes_equal_the_plain_loop(results: list[Any], reference: Any, case: str) -> None:
    mine, other = (each[case] for each in results)
    assert_same_training(*mine, *reference)
    assert mine[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, mine[1], other[1])


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_processes(results: list[Any]) -> None:
    for each in results:
        jax.tree.map(np.testing.assert_array_equal, *each["initial"])
