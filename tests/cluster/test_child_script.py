"""Files of the user's folder that are named like modules do not take their place, in no process of a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_jax.cluster.child_script import python_module
from tests.environment import of_child

ROOT = Path(__file__).parents[2]
NAMES = ("yaml", "queue", "random", "logging", "jax", "numpy", "zmq", "socket", "tempfile", "signal", "rrfp_jax")
SIMULATE = ("simulate", "--num-stages", "2", "--num-microbatches", "2")
RRFP = (sys.executable, "-P", "-m", "rrfp_jax.commands.main")
POOL = """
from concurrent.futures import ProcessPoolExecutor
from rrfp_jax.waiting import end_with_parent, spawning
if __name__ == "__main__":
    with spawning() as context, ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        print(pool.submit(abs, -7).result())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user has a file {name}.py')\n")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = of_child() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "the user has a file" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_and_the_coordination_process(folder: Path) -> None:
    assert "bf" in run(folder, *RRFP, "launch", "--processes", "2", "--", *SIMULATE)


def test_ranks_of_a_module_in_the_folder(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import multiprocessing, sys\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(*sys.argv[1:], pool.map(abs, [-7]))\n"
    )
    assert run(folder, *RRFP, "launch", "--processes", "2", "--", "mine", "a", "--b") == "a --b [7]\n"


def test_the_process_in_which_doctor_looks_at_jax(folder: Path) -> None:
    told = json.loads(run(folder, *python_module("rrfp_jax.commands.doctor", "probe-jax")).splitlines()[-1])
    assert told["num_devices"] >= 1


def test_processes_of_a_pool(folder: Path) -> None:
    (folder / "folder_of_scripts").mkdir()
    (folder / "folder_of_scripts/pool.py").write_text(POOL)
    assert run(folder, sys.executable, "folder_of_scripts/pool.py") == "7\n"


def test_modules_of_the_checkout(folder: Path) -> None:
    for name in ("experiments", "rrfp_jax"):
        (folder / name).symlink_to(ROOT / name)
    assert "bf" in run(folder, sys.executable, "-m", "experiments.simulate", *SIMULATE[1:])


def test_own_data_and_schedules_in_the_folder_are_found(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import numpy as np\n"
        "class Zeros:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, number):\n"
        "        row = np.zeros(4, int)\n"
        "        return {'tokens': row, 'targets': row, 'weights': row}\n"
    )
    (folder / "asks.py").write_text(
        "from rrfp_jax.data.own_data import OwnData, OwnDataConfig\n"
        "config = OwnDataConfig(object='mine:Zeros', batch_size=4, num_microbatches=2)\n"
        "print(OwnData(config, vocab_size=2).num_elements)\n"
    )
    assert run(folder, *python_module("asks")) == "8\n"
    (folder / "words.py").write_text("from rrfp_jax.schedules.language import B, F, rounds\n")
    (folder / "own.py").write_text(
        "import words\ndef mine(s):\n    return words.rounds(words.F.ahead(s.p - 1 - s.i), words.B)\n"
    )
    assert "own.py:mine" in run(folder, *RRFP, *SIMULATE, "--schedule", "own.py:mine")
