"""A real SLURM on this machine: a controller, and three nodes with names, networks and processes of their own.

Its programs come from Debian's packages, unpacked into ``build/`` and not installed. All of it lives in namespaces, and
these end with their first process, which ends when its standard input closes. So nothing outlives the test, however
that ends: no process, no mount, no network interface.
"""

import functools
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.environment import of_child
from tests.multiprocess.launching import ROOT

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
)
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "dpkg", "apt-get")
NODES = (1, 2, 3)
ADDRESSES = {host: f"10.213.9.1{host}" for host in (0, *NODES)}
UNPACKED = ROOT / "build" / "slurm" / "packages"
_HOSTS = Path(__file__).with_name("slurm_hosts.sh")
_START_S, _CALL_S, _DOWNLOAD_S = 30.0, 30.0, 120.0
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=h0
AuthType=auth/none
CredType=cred/none
SlurmUser=root
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/logs/slurmctld.log
SlurmdLogFile={folder}/logs/slurmd-%n.log
SlurmdParameters=config_overrides
# A node that is silent for so long is down, and its jobs are queued again; SLURM's default is 300.
SlurmdTimeout=6
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=h[1-3] CPUs=64 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES
"""


class Missing(Exception):
    """SLURM cannot run here; the text says what is missing."""


class Slurm:
    """The controller under test, see :func:`slurm`."""

    def __init__(self, folder: Path, environment: dict[str, str], pid: int) -> None:
        self.folder, self._environment, self._pid = folder, environment, pid

    def call(self, *words: object, **variables: str) -> str:
        """What a command prints that is run on the controller's host, in ``folder``."""
        within = ("nsenter", "--target", str(self._pid), "--mount", "--pid", "--net", "--uts", f"--wd={self.folder}")
        done = subprocess.run(
            [*within, *map(str, words)],
            env=self._environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CALL_S,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def idle(self) -> int:
        """How many nodes are up and have nothing to do."""
        return int(self.call("sinfo", "--noheader", "--states", "idle", "--responding", "--format", "%D") or 0)

    def job(self, job: str) -> dict[str, str]:
        """What SLURM says of a job: ``JobState``, ``Restarts``, ``NodeList``, ``ExitCode`` and more."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_job(self, job: str, timeout_s: float, **expected: str) -> dict[str, str]:
        """What SLURM says of a job once it says all of this."""
        until_s = time.monotonic() + timeout_s
        while not expected.items() <= (said := self.job(job)).items():
            is_over = said["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")
            assert not is_over, f"{expected} is awaited, but the job is over: {said}"
            assert time.monotonic() < until_s, f"{expected} is awaited, but after {timeout_s:g} s: {said}"
            time.sleep(0.1)
        return said

    def start_node(self, node: int) -> None:
        """Bring a node up that was killed."""
        self.call("bash", _HOSTS, "node", self.folder, node)

    @contextmanager
    def loopback_named(self, node: int) -> Iterator[None]:
        """As Debian does it: on this node, its own name leads to 127.0.1.1."""
        name_hosts(self.folder, node, ADDRESSES | {node: "127.0.1.1"})
        try:
            yield
        finally:
            name_hosts(self.folder, node, ADDRESSES)

    def kill_node(self, node: int) -> None:
        """End all processes of a node at once, without a word to anybody."""
        self.call("kill", "-KILL", (self.folder / f"h{node}.pid").read_text().strip())


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster whose files lie in ``folder``, with its logs in ``folder/logs``. Raises Missing."""
    _check_rights()
    root = _programs()
    libraries = next(root.glob("usr/lib/*/slurm-wlm"))
    for name in ("logs", "state", *(f"spool/h{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, plugins=libraries))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # version 2 would ask systemd for a place
    for host in (0, *NODES):
        name_hosts(folder, host, ADDRESSES)
    environment = {
        **of_child("JAX_PLATFORMS"),
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{libraries.parent}:{libraries}",
        "PATH": f"{root / 'usr/bin'}:{root / 'usr/sbin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    _check_libraries(root, environment)
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "bash", _HOSTS, "all", folder],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        has_said, _, _ = select.select([process.stdout], [], [], _START_S)
        pid = process.stdout.readline().strip() if has_said else ""
        if not pid:
            process.kill()
            assert process.stderr is not None
            raise Missing(f"hosts cannot be made of namespaces: {process.stderr.read().strip()}")
        cluster = Slurm(folder, environment, int(pid))
        until_s = time.monotonic() + _START_S
        while cluster.idle() < len(NODES):
            assert time.monotonic() < until_s, f"SLURM's nodes did not come up: see {folder / 'logs'}"
            time.sleep(0.2)
        yield cluster
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=_START_S)


def name_hosts(folder: Path, host: int, addresses: Mapping[int, str]) -> None:
    """Write what is ``/etc/hosts`` on a host."""
    named = [f"{address} h{other}" for other, address in addresses.items()]
    (folder / f"hosts.h{host}").write_text("\n".join(["127.0.0.1 localhost", *named, ""]))


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise Missing("the test makes hosts of namespaces, for which it must be root")
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise Missing(f"{', '.join(absent)} not found: packages util-linux, iproute2, dpkg and apt have them")


@functools.cache
def _programs() -> Path:
    """Where SLURM's packages are unpacked; they are fetched where they are not there yet."""
    if not (UNPACKED / "complete").exists():
        shutil.rmtree(UNPACKED, ignore_errors=True)
        UNPACKED.mkdir(parents=True)
        _run("apt-get", "download", *PACKAGES)
        for package in UNPACKED.glob("*.deb"):
            _run("dpkg", "-x", package.name, ".")
        (UNPACKED / "complete").touch()
    return UNPACKED


def _run(*command: str) -> None:
    try:
        subprocess.run(command, cwd=UNPACKED, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "stderr", "") or str(error)
        raise Missing(f"SLURM's packages cannot be had (apt-get update may help): {why.splitlines()[-1]}") from error


def _check_libraries(root: Path, environment: dict[str, str]) -> None:
    for program in ("usr/sbin/slurmctld-wlm", "usr/sbin/slurmd-wlm", "usr/bin/sbatch"):
        if not (root / program).exists():
            raise Missing(f"this system's SLURM packages have no {program}")
        found = subprocess.run(
            ["ldd", root / program], env=environment, capture_output=True, text=True, check=False, timeout=_CALL_S
        )
        if absent := [line.split()[0] for line in found.stdout.splitlines() if "not found" in line]:
            raise Missing(f"{program} needs {', '.join(absent)}, which this system has not")
