"""What is wrong with a host is found, with the remedy; the conditions are real wherever they can be."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrfp_jax.commands import doctor
from rrfp_jax.commands.doctor import (
    Finding,
    Status,
    check_cores,
    check_hardware,
    check_jax,
    check_memory,
    check_open_files,
    check_run_directory,
    check_shared_memory,
    check_start,
    guarded,
    main,
)
from rrfp_jax.hardware import core_quota, memory_limit
from tests.commands.running import ROOT
from tests.environment import of_child
from tests.fake_hosts import fake_package, fake_plugin, fake_smi

MAY_UNSHARE = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
)
DOCTOR = f"{sys.executable} -m rrfp_jax.commands.doctor --json"


def run(script: str, *within_: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell script in the checkout, the environment that of a user."""
    environment = {**of_child("JAX_PLATFORMS"), "PYTHONPATH": str(ROOT), **variables}
    command = [*within_, "bash", "-c", script]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    return {each["check"]: each for each in json.loads(done.stdout)["checks"]}


def assert_found(finding: Finding, status: Status, said: str, remedy: str) -> None:
    assert finding.status is status, finding
    assert said in finding.text
    assert remedy in finding.remedy


# -- this host, with everything wrong at once ----------------------------------------------------------------------


@pytest.mark.skipif(not MAY_UNSHARE, reason="mounting takes root")
def test_a_host_in_a_bad_state(tmp_path: Path) -> None:
    """Few open files, tiny shared memory, a run directory on a file system that is read-only, and a broken JAX."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\")\n")
    (tmp_path / "fixed").mkdir()
    script = f"""
    set -e
    mount -t tmpfs -o size=64k tmpfs /dev/shm
    mount -t tmpfs -o ro tmpfs {tmp_path}/fixed
    ulimit -n 64
    exec {DOCTOR} --run-dir {tmp_path}/fixed/runs
    """
    done = run(script, "unshare", "--mount", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2, done.stderr
    found = findings(done)
    bad = {name: each["status"] for name, each in found.items() if each["status"] != "ok"}
    expected = {"JAX": "problem", "open files": "problem", "run directory": "problem", "two ranks": "warning"}
    assert expected.items() <= bad.items()
    assert bad["shared memory"] in ("warning", "problem")
    assert found["JAX"]["text"] == "JAX does not start: ModuleNotFoundError: No module named 'jax'"
    assert str(found["JAX"]["remedy"]).startswith("install it anew: make setup ACCELERATOR=")
    assert str(found["open files"]["text"]).startswith("64, at most 64, too few")
    assert "ulimit -n 4096" in str(found["open files"]["remedy"])
    assert "64 KiB" in str(found["shared memory"]["text"])
    assert "--shm-size" in str(found["shared memory"]["remedy"])
    assert f"nothing can be written into {tmp_path}/fixed" in str(found["run directory"]["text"])
    assert found["two ranks"]["text"] == "not tried, since JAX does not start"
    assert json.loads(done.stdout)["problems"] == list(bad.values()).count("problem")


@pytest.mark.slow
def test_a_whole_visit(tmp_path: Path) -> None:
    """Two ranks start, and nothing is left in the run directory's place."""
    done = run(f"exec {DOCTOR.removesuffix(' --json')} --run-dir {tmp_path}/runs", JAX_PLATFORMS="cpu")
    assert "two ranks      started, met and ran steps together" in done.stdout, done.stdout
    assert done.returncode == (2 if "\nproblem" in done.stdout else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_that_cannot_start_are_told_with_their_own_words() -> None:
    done = run(f"ulimit -n 64; exec {DOCTOR}", JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    text = str(findings(done)["two ranks"]["text"])
    assert text.startswith("two ranks did not come to run a step, code ")
    assert "files open" in text


# -- one by one ----------------------------------------------------------------------------------------------------


def test_few_open_files_are_found_without_root() -> None:
    program = "from rrfp_jax.commands.doctor import check_open_files; print(check_open_files())"
    for limit, status in ((64, Status.PROBLEM), (160, Status.WARNING), (1024, Status.OK)):
        told = run(f"ulimit -n {limit}; exec {sys.executable} -c '{program}'").stdout
        assert f"status={status!r}" in told
        assert f"{limit}, at most {limit}" in told
    assert check_open_files().figures["ranks"] > 0


def test_small_and_missing_shared_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(check_shared_memory(tmp_path / "shm", has_gpu=True), Status.PROBLEM, "No such file", "--shm-size=8g")
    size = os.statvfs(tmp_path)
    few = os.statvfs_result((size.f_bsize, 4096, 16384, 16384, 16384, *size[5:]))  # 64 MiB, as in a container
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    assert_found(
        check_shared_memory(has_gpu=True),
        Status.PROBLEM,
        "64 MiB of 64 MiB free, too little for NCCL",
        "mount -o remount",
    )


def test_what_nvidia_smi_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_smi(tmp_path / "bin", "580.65.06")))
    assert check_hardware().figures == {"calls_for": "cuda13", "driver": "580.65.06"}
    fake_smi(tmp_path / "bin", "470.1")
    assert_found(check_hardware(), Status.PROBLEM, "470.1 is older than JAX needs", "update the driver")
    if not Path("/dev/nvidia0").exists():
        fake_smi(tmp_path / "bin", None)
        assert_found(check_hardware(), Status.WARNING, "nvidia-smi ends with code 9: NVIDIA-SMI has failed", "driver")


def test_a_gpu_that_jax_does_not_see_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_smi(tmp_path / 'bin', '580.65.06')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS")
    found = check_jax()
    assert_found(found, Status.PROBLEM, "but the installed JAX is for CPU only", "make setup ACCELERATOR=cuda13")
    assert found.figures["starts"]
    assert found.figures["platform"] == "cpu"


@pytest.mark.slow
def test_a_plugin_that_fails_is_found_with_what_jax_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_smi(tmp_path / 'bin', '580.65.06')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS")
    packages = str(fake_plugin(tmp_path / "packages", "raise RuntimeError('no CUDA runtime here')"))
    monkeypatch.setenv("PYTHONPATH", packages, prepend=os.pathsep)
    monkeypatch.syspath_prepend(packages)
    assert_found(check_jax(), Status.PROBLEM, "no CUDA runtime here", "install it again by")


def test_both_cuda_plugins_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (12, 13):
        fake_package(tmp_path, f"jax-cuda{number}-plugin")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert_found(check_jax(), Status.PROBLEM, "are both installed", "pip uninstall -y jax-cuda12-plugin")


def test_an_nccl_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "nvidia-nccl-cu13", "2.30.7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_PROBES", "tests.commands.answering_probe")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert_found(check_jax(), Status.PROBLEM, "nvidia-nccl-cu13 2.30.7", "pip install 'nvidia-nccl-cu13>2.30.7'")


def test_a_jax_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    found = check_jax(deadline_s=1.0)
    assert_found(found, Status.PROBLEM, "JAX has not started within 1 s", "end other programs that hold the devices")
    assert not found.figures["starts"]


def test_ranks_that_do_not_come_together_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert_found(check_start(jax_starts=True, deadline_s=0.3), Status.PROBLEM, "not done after 0.3 s", "--processes 2")


def test_a_run_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert_found(check_run_directory(Path("/proc/x")), Status.PROBLEM, "/proc/x", "--run-dir")
    (tmp_path / "file").touch()
    assert_found(check_run_directory(tmp_path / "file"), Status.PROBLEM, "is a file", "--run-dir")
    assert_found(check_run_directory(tmp_path / "file/runs"), Status.PROBLEM, "cannot be made", "--run-dir")
    assert check_run_directory(tmp_path / "deep/runs").status is not Status.PROBLEM
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def make_group(root: Path, lines: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_limits_of_control_groups_are_found(tmp_path: Path) -> None:
    new = make_group(
        tmp_path / "new",
        "0::/a/b\n",
        **{"a/memory.max": str(1 << 30), "a/b/memory.max": "max", "a/b/cpu.max": "50000 100000"},
    )
    assert (memory_limit(new), core_quota(new)) == (1 << 30, 0.5)
    assert_found(check_memory(new), Status.WARNING, "this container may use 1 GiB", "more memory")
    assert_found(check_cores(new), Status.WARNING, "time for 0.5 only", "limit of cores")
    files = {
        "memory/a/memory.limit_in_bytes": str(1 << 62),
        "memory/memory.limit_in_bytes": str(3 << 30),
        "cpu/a/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "50000",
    }
    old = make_group(tmp_path / "old", "4:memory:/a\n3:cpu,cpuacct:/a\n", **files)
    assert (memory_limit(old), core_quota(old)) == (3 << 30, 3.0)
    assert (memory_limit(tmp_path), core_quota(tmp_path)) == (None, None)


def test_a_check_neither_raises_nor_hangs() -> None:
    fine = Finding(status=Status.OK, text="fine")
    assert_found(guarded(lambda: 1 / 0), Status.PROBLEM, "ZeroDivisionError", "report")  # type: ignore[arg-type, return-value]
    late = guarded(lambda: time.sleep(5) or fine, deadline_s=0.05)
    assert_found(late, Status.PROBLEM, "no answer within 0.05 s", "hangs")
    assert guarded(lambda: fine, deadline_s=30).text == "fine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--head", "nowhere"], "'nowhere' is no address: give HOST:PORT"),
        (["--port", "99999"], "no address"),
        (["--head", "a:1", "--port", "2"], "--head has the port already"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        main(arguments)
