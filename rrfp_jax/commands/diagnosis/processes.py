"""Checks that start processes: the installed packages and the JAX that starts, and two ranks that run a step."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version

from rrfp_jax.cluster.as_module import python_module
from rrfp_jax.cluster.config import ATTEMPT, COORDINATOR, DETECT, NUM_RANKS, RANK, RENDEZVOUS
from rrfp_jax.commands.diagnosis import Finding, ok, problem, warning
from rrfp_jax.hardware import CPU, PACKAGES, find_hardware, install_command, installed_accelerators
from rrfp_jax.runtime.jax_environment import idle_plugin, two_cudas
from rrfp_jax.version import __version__

_PROBES = "rrfp_jax.commands.diagnosis.probes"
_JAX_DEADLINE_S = 120.0
"""The GPUs of a host that nothing has used take seconds each."""
_HANGING_NCCL = "2.30.7"
_LAUNCH = ("launch", "--processes", "2", "--start-deadline-s", "60", "--grace-s", "5", "--prefix", "always")
_RANKS_DEADLINE_S = 150.0
_OF_A_RANK = (RANK, NUM_RANKS, RENDEZVOUS, COORDINATOR, ATTEMPT, DETECT)
"""Variables under which the ranks would join another run."""
_LONGEST_REASON = 300


def check_versions() -> Finding:
    """Report the versions of this package and of Python."""
    python = platform.python_version()
    return ok(f"rrfp {__version__}, Python {python} ({sys.executable})", rrfp=__version__, python=python)


def check_jax(deadline_s: float = _JAX_DEADLINE_S) -> Finding:
    """Start JAX, and compare the devices that it sees with those of the host."""
    installed = installed_accelerators()
    if (both := two_cudas(installed)) is not None:
        return problem(*_text_and_remedy(both))
    try:
        done = subprocess.run(
            python_module(_PROBES, "jax"),
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "end other programs that hold the devices (a TPU belongs to one process), or look at their driver"
        return problem(f"JAX has not started within {deadline_s:.0f} s", remedy, starts=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return _broken_jax(lines[-1][:_LONGEST_REASON] if lines else f"code {done.returncode}")

    seen = json.loads(done.stdout.splitlines()[-1])
    plugins = {PACKAGES[name][0]: number for name, number in installed.items()}
    figures = {**seen, "plugins": plugins, "starts": True}
    if seen["platform"] == CPU:
        complaint = lines[-1][:_LONGEST_REASON] if any("plugin" in line for line in lines) else None
        if (idle := idle_plugin(os.environ, complaint)) is not None:
            return problem(*_text_and_remedy(idle), **figures)
    if (package := _hanging_nccl()) is not None:
        text = f"{package} {_HANGING_NCCL} is installed, with which pipelines over several GPUs hang"
        return problem(text, f"{sys.executable} -m pip install '{package}>{_HANGING_NCCL}'", **figures)
    number = seen["num_devices"]
    versions = {"jax": seen["jax"], "jaxlib": seen["jaxlib"], **plugins}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    devices = f"{number} {seen['platform']} device{'' if number == 1 else 's'} ({', '.join(seen['kinds'])})"
    return ok(f"{devices}; {packages}", **figures)


def _broken_jax(reason: str) -> Finding:
    """Returns the problem of a JAX that does not start."""
    complaint = reason.removeprefix("RuntimeError: ")
    is_of_plugin = complaint.startswith("Unable to initialize backend")
    if is_of_plugin and (idle := idle_plugin(os.environ, complaint)) is not None:
        return problem(*_text_and_remedy(idle), starts=False)
    install = install_command(find_hardware().accelerator)
    return problem(f"JAX does not start: {reason}", f"install it anew: {install}", starts=False)


def _text_and_remedy(sentence: str) -> tuple[str, str]:
    """Split a sentence at its last colon; a reason that JAX gives may hold colons too."""
    text, _, remedy = sentence.rpartition(": ")
    return text, remedy


def _hanging_nccl() -> str | None:
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            if version(package) == _HANGING_NCCL:
                return package
        except PackageNotFoundError:
            continue
    return None


def check_start(*, jax_starts: bool, deadline_s: float = _RANKS_DEADLINE_S) -> Finding:
    """Start two ranks with the launcher, let them run two steps together, and leave nothing behind."""
    if not jax_starts:
        return warning("not tried, since JAX does not start", "see above")
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    options = [*_LAUNCH, "--", _PROBES]
    by_hand = f"mend what is wrong above, or see all that is said: rrfp {' '.join(options)}"
    started_s = time.monotonic()
    with subprocess.Popen(
        python_module("rrfp_jax.commands.main", *options),
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            launcher.kill()  # its ranks end with it
            return problem(f"two ranks were not done after {deadline_s:g} s", by_hand)
        except BaseException:
            launcher.kill()
            raise
    if launcher.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no word"]
        reason = next((line for line in lines if "error:" in line or "Error" in line), lines[-1])[:_LONGEST_REASON]
        text = f"two ranks did not come to run a step, code {launcher.returncode}: {reason}"
        return problem(text, by_hand, code=launcher.returncode)
    took_s = time.monotonic() - started_s
    return ok(f"started, met and ran steps together, in {took_s:.0f} s", seconds=round(took_s, 1))
