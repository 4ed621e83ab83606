"""Both SLURM scripts on a real SLURM: the same bits as on one machine, also after preemption and the loss of a node.

Logs of SLURM, of the jobs, and the small files of their runs are kept under ``RRFP_ARTIFACTS`` (``build/slurm/kept``).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import ROOT, eventually, launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, Outcome, committed, outcome_of, training_config
from tests.multiprocess.slurm_cluster import NODES, Missing, Slurm, slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 40
EXACT: dict[str, Any] = {
    **{"deterministic": True, "steps": NUM_STEPS, "checkpoint_every": 5, "keep_checkpoints": 9},
    **{"num_stages": 4, "num_layers": 4, "hidden": 64, "mlp_dim": 128, "length": 32, "batch_size": 8},
    **{"path": str(ROOT / "LICENSE"), "silence_deadline_s": 30},
}
SCRIPTS = ("launchers.sbatch", "ranks.sbatch")
CORES = {"launchers.sbatch": 2 * 64, "ranks.sbatch": 4 * 8}
"""That all tasks together ask for, with two processes on each of two nodes."""
ENDED_S = 150.0
_SMALL_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("slurm")
    training_config(made, **EXACT)
    return made


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Slurm]:
    kept = Path(os.environ.get("RRFP_ARTIFACTS") or ROOT / "build" / "slurm" / "kept")
    try:
        with slurm(folder) as made:
            yield made
    except Missing as missing:
        pytest.skip(f"SLURM cannot run here: {missing}")
    finally:
        keep(folder, kept)


def keep(folder: Path, kept: Path) -> None:
    """Copy what is small and can be read."""
    shutil.rmtree(kept, ignore_errors=True)
    for pattern in ("logs/*", "*.log", "*.conf", "run.yaml", "runs/*/*"):
        for path in folder.glob(pattern):
            if path.is_file() and path.stat().st_size < _SMALL_BYTES:
                (kept / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept / path.relative_to(folder))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Outcome:
    """Of the same run in four processes of this machine, without SLURM."""
    arguments = ("--config", folder / "run.yaml", "--run-dir", folder / "local")
    with launched("--processes", 4, "--", "train", *arguments, **QUICK_TO_COMPILE) as launcher:
        assert launcher.wait(ENDED_S) == 0, launcher.text
    return outcome_of(folder / "local", NUM_STEPS)


class Job:
    """A run that was submitted."""

    def __init__(self, cluster: Slurm, script: str, *, processes: int = 1, **variables: str) -> None:
        path = ROOT / "tpu_gpu_configs" / "slurm" / script
        words = ["sbatch", "--parsable", "--nodes", 2, "--gpus-per-node", 0]
        if script == "launchers.sbatch":  # they are told how many processes each node has, or SLURM is
            words += [path, "run.yaml", processes]
        else:
            words += ["--ntasks-per-node", processes, path, "run.yaml"]
        rrfp = str(Path(sys.executable).with_name("rrfp"))
        self._cluster = cluster
        self.number = cluster.call(*words, RRFP=rrfp, **QUICK_TO_COMPILE, **variables)
        self.run = cluster.folder / "runs" / f"rrfp-{self.number}"

    def text(self) -> str:
        """What the job has printed."""
        path = self._cluster.folder / f"rrfp-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def await_state(self, **expected: str) -> dict[str, str]:
        try:
            return self._cluster.await_job(self.number, ENDED_S, **expected)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def await_steps(self, num_steps: int) -> None:
        def has_come() -> bool:
            metrics = self.run / "metrics.jsonl"
            return metrics.exists() and len(metrics.read_text().splitlines()) >= num_steps

        assert eventually(has_come, ENDED_S), self.text()

    def start_again(self) -> None:
        """Skip most of the two minutes that a requeued job waits; a node refuses one that it ended in that second."""
        self.await_state(JobState="PENDING", Restarts="1")
        self._cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")

    def finish(self) -> Outcome:
        """The outcome of the run once SLURM says that the job has ended well."""
        self.await_state(JobState="COMPLETED", ExitCode="0:0")
        assert not (self.run / "run.key").exists()
        return outcome_of(self.run, NUM_STEPS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_nodes_train_the_bits_of_one_machine(cluster: Slurm, script: str, expected: Outcome) -> None:
    job = Job(cluster, script, processes=2)
    job.await_steps(1)
    assert f" CPUs={CORES[script]} " in cluster.call("scontrol", "--oneliner", "show", "step", f"{job.number}.0")
    job.finish().assert_same(expected)
    assert cluster.job(job.number)["NodeList"] == "h[1-2]"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preempted_job_saves_and_goes_on_after_its_requeue(cluster: Slurm, script: str, expected: Outcome) -> None:
    job = Job(cluster, script)
    job.await_steps(7)
    cluster.call("scancel", "--signal=TERM", job.number)
    job.start_again()
    (last,) = committed(job.run)[-1:]
    assert 7 <= last < NUM_STEPS
    job.finish().assert_same(expected)
    assert f"told to stop: saved after step {last - 1}" in job.text()
    assert f"going on after {last} steps" in job.text()


@pytest.mark.parametrize(("script", "node"), [("launchers.sbatch", 2), ("ranks.sbatch", 1)])
def test_a_job_that_loses_a_node_goes_on_on_others(cluster: Slurm, script: str, node: int, expected: Outcome) -> None:
    """Node 1 is where the batch script runs, and the head."""
    job = Job(cluster, script)
    assert eventually(lambda: len(committed(job.run)) > 0, ENDED_S), job.text()
    cluster.kill_node(node)
    try:
        job.start_again()
        job.finish().assert_same(expected)
        assert cluster.job(job.number)["NodeList"] == {1: "h[2-3]", 2: "h[1,3]"}[node]
        assert re.search(r"going on after (5|10|15|20|25|30|35) steps", job.text())
    finally:
        cluster.start_node(node)
        assert eventually(lambda: cluster.idle() == len(NODES))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_that_the_user_cancels_is_not_queued_again(cluster: Slurm, script: str) -> None:
    job = Job(cluster, script)
    job.await_steps(1)
    cluster.call("scancel", job.number)
    assert job.await_state(JobState="CANCELLED")["Restarts"] == "0"
    assert not (job.run / "run.key").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_head_whose_name_is_loopbacks_is_refused_until_an_interface_is_named(
    cluster: Slurm, script: str, expected: Outcome
) -> None:
    with cluster.loopback_named(1):
        refused = Job(cluster, script, RRFP_MAX_REQUEUES="0", SLURM_WAIT="3")
        assert refused.await_state(JobState="FAILED")["Restarts"] == "0"
        assert "error: the name 'h1' leads to 127.0.1.1 on this host, which no other host can reach" in refused.text()
        assert "set RRFP_INTERFACE" in refused.text()
        Job(cluster, script, RRFP_INTERFACE="net0").finish().assert_same(expected)


def test_nothing_outlives_a_test_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from tests.multiprocess.slurm_cluster import slurm\n"
        "with slurm(pathlib.Path(sys.argv[1])): print('up', flush=True); time.sleep(600)"
    )
    folder = tmp_path / "killed"
    with subprocess.Popen([sys.executable, "-c", code, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        is_up = process.stdout.readline()
        if not is_up:
            pytest.skip("SLURM cannot run here, as the other tests say")
        assert len(named_in_environment(folder)) > len(NODES)
        process.kill()
    assert eventually(lambda: not named_in_environment(folder))
    assert str(folder) not in Path("/proc/mounts").read_text()


def named_in_environment(folder: Path) -> list[int]:
    """The processes with SLURM's configuration of this cluster."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURM_CONF={folder}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found
