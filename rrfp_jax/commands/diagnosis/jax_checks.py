"""What is installed, and what JAX sees: in a process of its own, since JAX may be absent, broken, or hang."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from rrfp_jax.cluster.as_module import python_module
from rrfp_jax.commands.diagnosis.finding import Finding, ok, problem
from rrfp_jax.hardware import CPU, PACKAGES, find_hardware, install_command, installed_accelerators
from rrfp_jax.runtime.plugins import idle_plugin, two_cudas
from rrfp_jax.version import __version__

_PROBE = "rrfp_jax.commands.diagnosis.jax_probe"
_DEADLINE_S = 120.0
"""The GPUs of a host that nothing has used take seconds each."""
_HANGING_NCCL = "2.30.7"
_NOT_STARTED = "Unable to initialize backend"
_REASON = 300


def check_versions() -> Finding:
    """This package and its Python."""
    return ok(
        f"rrfp {__version__}, Python {platform.python_version()} ({sys.executable})",
        rrfp=__version__,
        python=platform.python_version(),
    )


def check_jax(deadline_s: float = _DEADLINE_S) -> Finding:
    """The platform and the devices that JAX sees, and whether these are the host's."""
    installed = installed_accelerators()
    if (both := two_cudas(installed)) is not None:
        return problem(*_parted(both))
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    try:
        done = subprocess.run(
            python_module(_PROBE),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return problem(
            f"JAX has not started within {deadline_s:.0f} s",
            "end other programs that hold the devices (a TPU belongs to one process), or look at their driver",
            starts=False,
        )
    if done.returncode:
        return _broken(done)
    seen = json.loads(done.stdout.splitlines()[-1])
    plugins = {PACKAGES[name][0]: number for name, number in installed.items()}
    figures = {**seen, "plugins": plugins, "starts": True}
    if seen["platform"] == CPU and (idle := idle_plugin(os.environ, _complaint(done.stderr))) is not None:
        return problem(*_parted(idle), **figures)
    if (hanging := _hanging_nccl()) is not None:
        return problem(
            f"{hanging} is installed, with which pipelines over several GPUs hang", _newer(hanging), **figures
        )
    number = seen["num_devices"]
    packages = ", ".join(
        f"{name} {at}" for name, at in (("jax", seen["jax"]), ("jaxlib", seen["jaxlib"]), *plugins.items())
    )
    devices = f"{number} {seen['platform']} device{'' if number == 1 else 's'} ({', '.join(seen['kinds'])})"
    return ok(f"{devices}; {packages}", **figures)


def _broken(done: "subprocess.CompletedProcess[str]") -> Finding:
    """JAX does not start at all."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip()[:_REASON] if lines else f"code {done.returncode}"
    told = reason.removeprefix("RuntimeError: ")
    if told.startswith(_NOT_STARTED) and (idle := idle_plugin(os.environ, told)) is not None:
        return problem(*_parted(idle), starts=False)
    accelerator = find_hardware().accelerator
    return problem(f"JAX does not start: {reason}", f"install it anew: {install_command(accelerator)}", starts=False)


def _parted(sentence: str) -> tuple[str, str]:
    """Finding and remedy of a sentence that holds both; a reason that JAX gives may hold colons too."""
    text, _, remedy = sentence.rpartition(": ")
    return text, remedy


def _complaint(stderr: str) -> str | None:
    """What JAX has said of a plugin, in a line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:_REASON] if any("plugin" in line for line in lines) else None


def _hanging_nccl() -> str | None:
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            if version(package) == _HANGING_NCCL:
                return f"{package} {_HANGING_NCCL}"
        except PackageNotFoundError:
            continue
    return None


def _newer(package: str) -> str:
    return f"{sys.executable} -m pip install '{package.split(maxsplit=1)[0]}>{_HANGING_NCCL}'"
