"""The accelerators of this host, the JAX that they call for and the one installed, and the limits of its containers.

The standard library is all that is needed here: ``make setup`` runs this file by its path before anything is installed.

::

    python -P rrfp_jax/hardware.py WANTED FILE    # WANTED as ACCELERATOR= says, empty: the host decides

An accelerator is named as the extra that installs JAX for it: ``cuda12``, ``cuda13``, ``tpu``, or ``cpu`` for none.
``system`` stands for the JAX that the Python of an environment has already, as in the image of a vendor.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU, CUDA12, CUDA13, TPU, SYSTEM = "cpu", "cuda12", "cuda13", "tpu", "system"
ACCELERATORS = (CPU, CUDA12, CUDA13, TPU, SYSTEM)
OLDEST_DRIVER = {CUDA13: 580, CUDA12: 525}
"""The major version of NVIDIA's driver that each CUDA needs at least, the newest CUDA first."""
PACKAGES = {
    CUDA12: ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
    CUDA13: ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    TPU: ("libtpu",),
}
"""Packages that make JAX use each accelerator; the first one tells whether it is installed."""
RECORD = ".accelerator"
"""The file, in an environment that ``make setup`` has made, that names the accelerator."""
_SMI_TIMEOUT_S = 60.0
"""nvidia-smi wakes GPUs that nothing has used, which takes seconds for each."""
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083")
"""PCI devices, from v2 to v8, as JAX 0.12 knows them."""


@dataclass(frozen=True)
class Found:
    """The accelerator that a host calls for, and the reason."""

    accelerator: str
    """One of :data:`ACCELERATORS`; ``cuda12`` also where the driver is too old for either."""
    why: str
    driver: str | None = None
    """The version of NVIDIA's driver, as ``580.65.06``."""

    @property
    def is_too_old(self) -> bool:
        """Whether the driver serves no CUDA that JAX comes with."""
        return self.driver is not None and major(self.driver) < min(OLDEST_DRIVER.values())


def find_hardware(root: Path = Path("/")) -> Found:
    """Look at NVIDIA's driver, then for TPUs; ``root`` is where ``proc``, ``sys`` and ``dev`` are."""
    lines, problem = _ask_smi("driver_version")
    driver = lines[0] if lines and lines[0].partition(".")[0].isdecimal() else None
    if driver is None and (root / "dev/nvidia0").exists():  # containers may have GPUs without nvidia-smi
        with suppress(OSError):
            words = (root / "proc/driver/nvidia/version").read_text().split()
            driver = next((each for each in words if "." in each and each.replace(".", "").isdecimal()), None)
    if driver is not None:
        fitting = (name for name, oldest in OLDEST_DRIVER.items() if major(driver) >= oldest)
        return Found(next(fitting, CUDA12), f"NVIDIA driver {driver}", driver)
    num_tpus = 0
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        with suppress(OSError):
            is_google = vendor.read_text().strip() == _GOOGLE
            num_tpus += is_google and vendor.with_name("device").read_text().strip() in _TPUS
    if num_tpus:
        return Found(TPU, f"{num_tpus} TPU chip{'' if num_tpus == 1 else 's'}")
    problem = problem or f"nvidia-smi ends with code 0: {' '.join(lines)}".rstrip(": .")
    return Found(CPU, f"no NVIDIA GPU ({problem}) and no TPU found")


def installed_accelerators() -> dict[str, str]:
    """The accelerators that the environment's JAX is made for, each with the version of its plugin."""
    found = {}
    for name, packages in PACKAGES.items():
        try:
            found[name] = version(packages[0])
        except PackageNotFoundError:
            continue
    return found


def install_command(accelerator: str) -> str:
    """Returns the command that installs JAX for an accelerator, in a checkout or beside a package installed by pip."""
    checkout = Path(__file__).parents[1]
    if (checkout / "Makefile").is_file() and (checkout / "pyproject.toml").is_file():
        return f"make setup ACCELERATOR={accelerator}"
    return f'{shlex.quote(sys.executable)} -m pip install "rrfp-jax[{accelerator}]"'


def replacement(new: str, *old: str) -> str:
    """The command that installs JAX for an accelerator in place of the plugins of others, or of its own.

    Where the plugins are those of an image, pip takes nothing out of it: the environment is made anew without them.
    """
    if is_of_image():
        return f"make clean && {install_command(new)}"
    return f"{removal(*old)} && {install_command(new)}"


def removal(*accelerators: str) -> str:
    """The command that takes the plugins of accelerators out of this environment."""
    packages = [package for accelerator in accelerators for package in PACKAGES[accelerator]]
    return f"{shlex.quote(sys.executable)} -m pip uninstall -y {' '.join(packages)}"


def is_of_image() -> bool:
    """Whether the environment takes JAX and its plugins from the Python that it was made with (``system``)."""
    record = Path(sys.prefix, RECORD)
    return record.is_file() and record.read_text(encoding="utf-8").strip() == SYSTEM


def too_old() -> str:
    """Returns the words for a driver that serves no CUDA, with the oldest versions that do."""
    return f"older than JAX needs ({OLDEST_DRIVER[CUDA12]} for CUDA 12, {OLDEST_DRIVER[CUDA13]} for CUDA 13)"


def major(driver: str) -> int:
    """The first number of a driver's version."""
    return int(driver.partition(".")[0])


def smallest_gpu_bytes() -> int | None:
    """Returns the memory of the NVIDIA GPU of this host that has least; None where nvidia-smi does not tell."""
    lines, _ = _ask_smi("memory.total")
    return min(map(int, lines)) * 2**20 if lines and all(line.isdecimal() for line in lines) else None


def _ask_smi(field: str) -> tuple[list[str], str]:
    """Returns the answer of nvidia-smi, a line for each GPU, without units; or no lines, and why it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (FileNotFoundError, PermissionError):  # the latter also where a folder of the PATH is another user's
        return [], "no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0:
        return lines, ""
    told = " ".join([*lines, *done.stderr.split("\n")]).strip()
    return [], f"nvidia-smi ends with code {done.returncode}" + (f": {told.rstrip('.')}" if told else "")


# -- limits that Linux control groups, version 1 and 2, put on this process --------------------------------------------


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's control groups allow, the least of all; None without a limit."""
    found = [
        int(text) for text in _group_files(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()
    ]
    return min((limit for limit in found if limit < 1 << 60), default=None)  # version 1 writes a huge number for none


def core_quota(root: Path = Path("/")) -> float | None:
    """Returns the number of cores whose time this process's control groups allow; None without a limit."""
    old_period = next(_group_files(root, "cpu", "", "cpu.cfs_period_us"), "100000")
    quotas = (text.partition(" ") for text in _group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"))
    return min((int(q) / int(period or old_period) for q, _, period in quotas if q.isdigit()), default=None)


def _group_files(root: Path, controller: str, new_name: str, old_name: str) -> Iterator[str]:
    """Yields the text of a file in the folders of this process's group and of all groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and controller not in controllers.split(","):
            continue
        # A line without controllers is that of version 2, whose groups lie in one tree.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (old_name if controllers else new_name)
            if folder.is_relative_to(mount) and file.is_file():
                yield file.read_text().strip()


# -- what `make setup` asks ----------------------------------------------------------------------------------------


def choose(wanted: str) -> tuple[str, str]:
    """Returns the accelerator to install JAX for, and one line that says so with the reason.

    Args:
        wanted: the accelerator that the user names; empty for the one that the host calls for.

    Raises ValueError, with the command that mends it, where that cannot be, or does not go with the packages installed.
    """
    if wanted and wanted not in ACCELERATORS:
        raise ValueError(f"ACCELERATOR is '{wanted}': give one of {', '.join(ACCELERATORS)}")
    if wanted == SYSTEM:
        return wanted, f"JAX {_system_jax()} of {sys.base_prefix}, as ACCELERATOR says"
    found, installed = find_hardware(), installed_accelerators()
    if wanted:
        _check_alone(wanted, installed)
        doubt, oldest = "", OLDEST_DRIVER.get(wanted, 0)
        if found.driver is not None and major(found.driver) < oldest:  # no error: it may be for another host
            doubt = f"; note that it needs NVIDIA driver {oldest}, and this host has {found.driver}"
        return wanted, f"JAX for {wanted}, as ACCELERATOR says{doubt}"
    if found.is_too_old:
        raise ValueError(
            f"{found.why} is {too_old()}: update the driver, or leave the GPU out by 'make setup ACCELERATOR=cpu'"
        )
    if found.accelerator == CPU and len(installed) == 1:
        (kept,) = installed
        return kept, f"JAX for {kept}, since {PACKAGES[kept][0]} is installed already; {found.why} here"
    _check_alone(found.accelerator, installed)
    return found.accelerator, f"JAX for {found.accelerator}: {found.why}; ACCELERATOR=... takes another"


def _system_jax() -> str:
    """Returns the version of JAX that the environment takes from its Python; raises ValueError where it is no use."""
    settings = Path(sys.prefix, "pyvenv.cfg")
    if not re.search("(?m)^include-system-site-packages = true$", settings.read_text() if settings.exists() else ""):
        raise ValueError(
            f"the environment {sys.prefix} does not see the packages of its Python: remove it by 'make clean', then "
            f"run 'make setup ACCELERATOR={SYSTEM}'"
        )
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest,) = (need.removeprefix("jax>=") for need in project["dependencies"] if need.startswith("jax>="))
    other = f"take another image, or JAX from its packages by another ACCELERATOR ({', '.join(ACCELERATORS[:-1])})"
    try:
        found = version("jax")
    except PackageNotFoundError:
        raise ValueError(f"{sys.base_prefix} has no JAX, and {oldest} or newer is needed: {other}") from None
    # The numbers at the beginning of each version count, as 0.10.2 of 0.10.2.dev3+local.
    ours, least = (list(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))) for text in (found, oldest))
    if ours < least:
        raise ValueError(f"{sys.base_prefix} has JAX {found}, and {oldest} or newer is needed: {other}")
    return found


def _check_alone(chosen: str, installed: Mapping[str, str]) -> None:
    """Refuses plugins that break JAX side by side, or that JAX would use in place of the one chosen."""
    others = [
        other for other in installed if other != chosen and (chosen == CPU or {other, chosen} <= {*OLDEST_DRIVER})
    ]
    if not others:
        return
    held = " and ".join(f"{PACKAGES[name][0]} {number}" for name, number in installed.items() if name != chosen)
    reason = "JAX would take the device" if chosen == CPU else "two CUDA plugins side by side break JAX"
    keep = (
        f", or keep it by 'make setup ACCELERATOR={others[0]}'" if chosen not in installed and len(others) == 1 else ""
    )
    raise ValueError(
        f"the environment holds {held} and is to be for {chosen}, but {reason}: run "
        f"'{replacement(chosen, *others)}'{keep}"
    )


def main(wanted: str, file: str) -> int:
    """Prints the accelerator chosen and writes its name into ``file``, unless it stands there and is installed."""
    try:
        chosen, line = choose(wanted.strip())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = Path(file)
    is_as_recorded = record.exists() and record.read_text(encoding="utf-8").strip() == chosen
    if is_as_recorded and (chosen in (CPU, SYSTEM) or chosen in installed_accelerators()):
        return 0
    print(line)
    record.write_text(f"{chosen}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
