"""Look at this host as a run would find it: devices, limits, memory, the head, the run directory, two ranks that start.

::

    rrfp doctor
    rrfp doctor --head HOST0:8476 --run-dir /shared/runs
    rrfp launch --processes 4 -- doctor --links machine.json

With ``--head`` run it on each of several hosts. One line per check: ok, warning or problem, and the action to take.
Ends with 0 where there is no problem, else with 2. Nothing is left behind, and nothing is waited for without a
deadline. With ``--links`` the ranks of a launch measure the links between them, and check nothing.
"""

import argparse
import errno
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any

import psutil
from rich.text import Text

from rrfp_jax.cluster.child_script import python_module
from rrfp_jax.cluster.config import (
    ATTEMPT,
    COORDINATOR,
    DETECT,
    INTERFACE,
    LOOPBACK,
    NUM_RANKS,
    RANK,
    RENDEZVOUS,
    Address,
    ClusterConfig,
    LaunchSettings,
)
from rrfp_jax.cluster.host import addresses_of, is_misleading, listens_on, ranks_served
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import enter
from rrfp_jax.exit_codes import BAD_INPUT, DONE
from rrfp_jax.hardware import (
    CPU,
    PACKAGES,
    core_quota,
    find_hardware,
    install_command,
    installed_accelerators,
    memory_limit,
    too_old,
)
from rrfp_jax.observe.output_files import check_file, check_folder
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime.cluster import membership_from
from rrfp_jax.runtime.jax_environment import idle_plugin, two_cudas
from rrfp_jax.storage import BucketPath, check_bucket, located
from rrfp_jax.version import __version__

_GIB = 1 << 30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_SHARED = _GIB
"""Containers have 64 MiB unless they are told otherwise, which is too little for NCCL."""
_MORE_SHARED = (
    "give the container more (docker run --shm-size=8g; Kubernetes: an emptyDir with medium Memory there), or "
    "mount -o remount,size=8G {}"
)
_FEW_RANKS = 16
_PORT = 8476
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT)
_CONNECT_S = 3.0
_DEADLINE_S = 15.0
"""Deadline of a check; checks that start processes have deadlines of their own."""
_JAX_DEADLINE_S = 120.0
"""The GPUs of a host that nothing has used take seconds each."""
_RANKS_DEADLINE_S = 150.0
_PROBES, _PROBE_JAX, _PROBE_RANK = "rrfp_jax.commands.doctor", "probe-jax", "probe-rank"
"""The module of the probes, and their names. They run in processes of their own, since each may fail or hang."""
_LAUNCH = ("launch", "--processes", "2", "--start-deadline-s", "60", "--grace-s", "5", "--prefix", "always")
_OF_A_RANK = (RANK, NUM_RANKS, RENDEZVOUS, COORDINATOR, ATTEMPT, DETECT)
"""Variables under which the ranks would join another run."""
_HANGING_NCCL = "2.30.7"
_LONGEST_REASON = 300


class Status(StrEnum):
    """How well the host serves a run: all is well, some runs will suffer, or runs will fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    status: Status
    text: str
    remedy: str = ""
    """The action to take; empty where all is well."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same facts as plain data, for JSON."""


def _ok(text: str, **figures: Any) -> Finding:
    return Finding(status=Status.OK, text=text, figures=figures)


def _warning(text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(status=Status.WARNING, text=text, remedy=remedy, figures=figures)


def _problem(text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(status=Status.PROBLEM, text=text, remedy=remedy, figures=figures)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.links is not None:
        return _write_links(Path(arguments.links), as_json=arguments.json)
    with checking_input():
        head = None if arguments.head is None else Address.parse(arguments.head)
        if arguments.port is not None:
            if head is not None:
                raise ValueError("--head has the port already: leave --port out")
            Address.parse(f"localhost:{arguments.port}")
    console, found = make_console(is_quiet=arguments.json), {}
    for name, finding in _findings(arguments, head):
        found[name] = finding
        remedy = f": {finding.remedy}" if finding.remedy else ""
        status = (f"{finding.status:<8}", _STYLES[finding.status])
        console.print(Text.assemble(status, f" {name:<14} {finding.text}{remedy}"), soft_wrap=True)
    problems, warnings = (sum(f.status is s for f in found.values()) for s in (Status.PROBLEM, Status.WARNING))
    counts = [(problems, "problem"), (warnings, "warning")]
    console.print(", ".join(f"{count or 'no'} {noun}{'' if count == 1 else 's'}" for count, noun in counts))
    if arguments.json:
        checks = [{"check": name, **asdict(finding)} for name, finding in found.items()]
        print(json.dumps({"problems": problems, "warnings": warnings, "checks": checks}))
    return BAD_INPUT if problems else DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("doctor", __doc__)
    parser.add_argument("--run-dir", default="runs", metavar="PATH", help="where runs are to write")
    parser.add_argument("--no-start", action="store_true", help="start no ranks, which takes some seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    add = parser.add_argument_group("several hosts").add_argument
    add("--links", metavar="FILE.json", help="under launch: measure the links between ranks, for rrfp plan --machine")
    add("--head", metavar="HOST:PORT", help="node 0's address, as for launch: check that it can be reached")
    add("--interface", metavar="IF", help="the interface for ranks to listen on (default: the one to the head)")
    add("--port", type=int, metavar="N", help=f"the first of the two ports of a head on this host (default {_PORT})")
    return parser


def _write_links(path: Path, *, as_json: bool) -> int:
    """Measure the links between the ranks of a launch, and write them into the section ``machine`` of a file."""
    from rrfp_jax.planner.cost_file import machine_in, write_machine

    with checking_input():
        membership = membership_from(os.environ)
        if membership is None or membership.num_ranks < 2:
            raise ValueError(
                f"--links is for several ranks: start them with rrfp launch --processes N -- doctor --links {path}"
            )
        known = None
        if not membership.rank:  # which writes
            check_file(path, "links")
            known = machine_in(path)
        process = enter(num_stages=membership.num_ranks, configuration={}, cluster=ClusterConfig(), platform=None)
    from rrfp_jax.planner.measuring import measure_links

    found = measure_links(process)
    process.finish()
    if found is None:
        return DONE
    if known is not None and len(known.devices) == len(found.devices):
        found = replace(found, devices=known.devices)  # with the speeds that rrfp profile has measured
    write_machine(found, path)
    if as_json:
        print(json.dumps(asdict(found) | {"output": str(path)}))
        return DONE
    pairs = list(permutations(range(len(found.devices)), 2))
    later, slower = (
        max(pairs, key=lambda pair: found.latency_ms[pair[0]][pair[1]]),
        min(pairs, key=lambda pair: found.gb_per_s[pair[0]][pair[1]] or inf),
    )
    latency_ms, gb_per_s = found.latency_ms[later[0]][later[1]], found.gb_per_s[slower[0]][slower[1]]
    print(
        f"{len(pairs)} links: at most {latency_ms:.3g} ms (rank {later[0]} to {later[1]}), "
        + ("" if gb_per_s is None else f"at least {gb_per_s:.3g} GB/s (rank {slower[0]} to {slower[1]}); ")
        + f"they are in {path}"
    )
    return DONE


def _findings(arguments: argparse.Namespace, head: Address | None) -> Iterator[tuple[str, Finding]]:
    """Yields each finding as soon as it is made, because the slow checks come first and last."""
    port = head.port if head is not None else arguments.port or _PORT
    is_requested = head is not None or arguments.port is not None
    interface = arguments.interface or os.environ.get(INTERFACE) or None
    python = platform.python_version()
    yield "versions", _ok(f"rrfp {__version__}, Python {python} ({sys.executable})", rrfp=__version__, python=python)
    hardware = guarded(check_hardware)
    yield "accelerators", hardware
    jax = guarded(check_jax)
    yield "JAX", jax
    has_gpu = hardware.figures.get("driver") is not None
    quick: dict[str, Callable[[], Finding]] = {
        "cores": check_cores,
        "memory": check_memory,
        "shared memory": lambda: check_shared_memory(has_gpu=has_gpu),
        "open files": check_open_files,
        **({} if head is None else {"head": lambda: check_head(head, interface)}),
        "ports": lambda: check_ports(head, port, is_requested=is_requested),
        "run directory": lambda: check_run_directory(Path(arguments.run_dir)),
    }
    for name, check in quick.items():
        yield name, guarded(check, deadline_s=_DEADLINE_S)
    if not arguments.no_start:
        starts = bool(jax.figures.get("starts"))
        yield "two ranks", guarded(lambda: check_start(jax_starts=starts))


def guarded(check: Callable[[], Finding], *, deadline_s: float | None = None) -> Finding:
    """Run a check, on a thread of its own if there is a deadline. A check that raises, or is late, is a problem itself.

    File systems and name servers that are gone may block a thread for ever, so a late thread is left behind.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check())
        except Exception as error:
            found.append(_problem(f"cannot be told: {type(error).__name__}: {error}", "please report this"))

    if deadline_s is None:
        run()
        return found[0]
    thread = threading.Thread(target=run, name="rrfp-doctor", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if found:
        return found[0]
    return _problem(f"no answer within {deadline_s:g} s", "see which file system, name server or device hangs")


def check_cores(root: Path = Path("/")) -> Finding:
    """Compare the cores that this process may use with the processor time that its control groups allow."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    figures = {"usable": usable, "of_host": os.cpu_count(), "quota": quota}
    text = f"{usable} of {os.cpu_count()} cores"
    if quota is None or quota >= usable:
        return _ok(text, **figures)
    remedy = "raise the container's limit of cores, or start it on as many cores as it may use (--cpuset-cpus)"
    return _warning(f"{text}, but time for {quota:.3g} only", remedy, **figures)


def check_memory(root: Path = Path("/")) -> Finding:
    """Find the memory that is free on the host, and the limit of this process."""
    memory, limit = psutil.virtual_memory(), memory_limit(root)
    figures = {"total_bytes": memory.total, "available_bytes": memory.available, "limit_bytes": limit}
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} are free"
    text += "" if limit is None else f", this container may use {format_bytes(limit)}"
    if min(memory.available, limit or memory.available) < _LITTLE_MEMORY:
        return _warning(text, "end other programs, or give the container more memory", **figures)
    return _ok(text, **figures)


def check_hardware() -> Finding:
    """Find GPUs and TPUs, whether the installed JAX supports them or not."""
    found = find_hardware()
    figures = {"calls_for": found.accelerator, "driver": found.driver}
    if found.is_too_old:
        return _problem(f"{found.why} is {too_old()}", "update the driver, or take platform cpu", **figures)
    if found.accelerator == CPU and shutil.which("nvidia-smi") is not None:
        remedy = "where there is a GPU, look after its driver: dmesg, or start the host anew"
        return _warning(found.why, remedy, **figures)
    return _ok(found.why, **figures)


def check_shared_memory(path: Path = Path("/dev/shm"), *, has_gpu: bool) -> Finding:
    """Check the size of shared memory, through which NCCL connects the processes of a host."""
    found = _problem if has_gpu else _warning
    try:
        size = os.statvfs(path)
    except OSError as error:
        return found(f"{path}: {error.strerror}", _MORE_SHARED.format(path))
    total, free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    text = f"{path} has {format_bytes(free)} of {format_bytes(total)} free"
    if free >= _LITTLE_SHARED:
        return _ok(text, total_bytes=total, free_bytes=free)
    remedy = _MORE_SHARED.format(path) if total < _LITTLE_SHARED else "remove what ended programs have left there"
    text += ", too little for NCCL among the processes of a host"
    return found(text, remedy, total_bytes=total, free_bytes=free)


def check_open_files() -> Finding:
    """Check the limit on open files, which every process raises as far as it may."""
    infinite = resource.RLIM_INFINITY
    soft, hard = (None if number == infinite else number for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    ranks = ranks_served(1 << 20 if hard is None else hard)
    text = "{}, at most {}".format(*("no limit" if number is None else number for number in (soft, hard)))
    remedy = "set 'ulimit -n 4096' or more before the start (as root, or in /etc/security/limits.conf)"
    if ranks < 2:
        text = f"{text}, too few for a rank that talks to others"
        return _problem(text, remedy, soft=soft, hard=hard, ranks=ranks)
    text = f"{text}, enough for {ranks} ranks that all talk to each other"
    if ranks < _FEW_RANKS:
        return _warning(text, remedy, soft=soft, hard=hard, ranks=ranks)
    return _ok(text, soft=soft, hard=hard, ranks=ranks)


def check_run_directory(path: Path) -> Finding:
    """Check that the run directory can be written, and leave nothing there.

    The trial write is made in the nearest folder that exists, because the path itself may be made by the run only.
    """
    if isinstance(path := located(path), BucketPath):
        try:
            check_bucket(path, "run directory")
        except ValueError as error:
            text, _, remedy = str(error).rpartition(": ")
            return _problem(text, remedy)
        return _ok(f"objects can be made once, listed, read and removed in {path}", path=str(path))
    remedy = "name another one (--run-dir), or make it writable"
    try:
        check_folder(path, "run directory")
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    except (OSError, ValueError) as error:
        return _problem(str(error).removesuffix(", so name another folder"), remedy)
    try:
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
            os.fsync(probe.fileno())  # a full or remote disk may refuse the bytes only now
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        text = f"run directory {path}: nothing can be written into {nearest} ({error.strerror})"
        return _problem(text, remedy)
    text = f"{path} can be written, {format_bytes(free)} are free"
    if free < _GIB:
        return _warning(
            f"{text}, little for checkpoints", "remove what is not needed, or name another one", free_bytes=free
        )
    return _ok(text, free_bytes=free, path=str(path.absolute()))


def own_addresses() -> dict[str, list[str]]:
    """Returns the addresses of every interface that is up, without those for one link only."""
    states = psutil.net_if_stats()
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [each.address for each in addresses if each.family in _FAMILIES and "%" not in each.address]
        if usable and name in states and states[name].isup:
            found[name] = usable
    return found


def check_head(head: Address, interface: str | None) -> Finding:
    """Check that the head's name resolves to a host that this one can reach, and find the interface to it."""
    try:
        addresses = addresses_of(head.host)
    except OSError as error:
        remedy = "write it into /etc/hosts or the name server, or give node 0's address"
        return _problem(f"{head.host} does not resolve ({error.strerror})", remedy)
    if interface is not None and interface not in own_addresses() and _interface_of(interface) is None:
        text = f"{interface} is no interface of this host that is up, and no address of it"
        return _problem(text, f"give another one (--interface, or {INTERFACE})")
    is_own = is_here(head)
    figures = {"addresses": addresses, "is_here": is_own}
    if is_misleading(head.host, head.port) and not (is_own and interface is not None):
        # Debian writes a host's own name into /etc/hosts with a loopback address, so each host takes itself for node 0.
        return _problem(
            f"{head.host} is {addresses[0]} here, which leads to no other host",
            "give node 0's address in the network that the hosts share or mend /etc/hosts; on node 0 itself "
            f"{INTERFACE} or --interface will do",
            **figures,
        )
    return _route_to(head, addresses, interface, figures)


def _route_to(head: Address, addresses: list[str], interface: str | None, figures: dict[str, Any]) -> Finding:
    """Returns how this host reaches the head at its ``addresses``; ``figures`` are those of the finding so far."""
    is_own = figures["is_here"]
    try:
        rank = 0 if is_own else 1
        settings = LaunchSettings(command=("-",), num_processes=1, num_nodes=2, node_rank=rank, head=head)
        own = interface or listens_on(settings) or LOOPBACK
    except ValueError as error:
        return _problem(str(error), "give an address that this host has a route to", **figures)
    if ip_address(addresses[0]).is_loopback and interface is None:
        return _warning(f"{head.host} is {addresses[0]}: for this host alone", "give node 0's address", **figures)
    if is_own:
        return _ok(f"{head.host} is this host, {_with_name(own)}", **figures)
    text = f"{head.host} is {addresses[0]}, reached from {_with_name(own)}"
    return _answer_of(head, text, figures)


def _answer_of(head: Address, text: str, figures: dict[str, Any]) -> Finding:
    """Try the head's port on another host; ``text`` and ``figures`` are the finding so far."""
    try:
        socket.create_connection((head.host, head.port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return _ok(f"{text}; nothing listens yet at port {head.port}", **figures)
    except OSError:
        remedy = f"let the hosts reach ports {head.port} and {head.port + 1} of node 0 through firewalls"
        return _warning(f"{text}, but does not answer", remedy, **figures)
    return _ok(f"{text}; something listens at port {head.port}", **figures)


def check_ports(head: Address | None, port: int, *, is_requested: bool) -> Finding:
    """Check that the two ports of a head are free here; ``is_requested``: a run is to take exactly these."""
    if head is not None and not is_here(head):
        return _ok(f"{head.port} and {head.port + 1} are used on the head's host")
    ports = [port, port + 1]
    taken = {number: why for number in ports if (why := _why_taken(number)) is not None}
    if not taken:
        return _ok(f"{port} and {port + 1} are free", ports=ports)
    text = "port " + ", ".join(f"{number}: {why}" for number, why in taken.items())
    remedy = "end the run or program that has it, or give a head another port (--head HOST:PORT); a run on one host "
    remedy += "takes free ones"
    found = _problem if is_requested else _warning
    return found(text, remedy, ports=ports, taken=sorted(taken))


def is_here(head: Address) -> bool:
    """Returns whether this host is the head's."""
    try:
        return any(_interface_of(address) for address in addresses_of(head.host))
    except OSError:
        return False


def _interface_of(address: str) -> str | None:
    return next((name for name, addresses in own_addresses().items() if address in addresses), None)


def _with_name(address: str) -> str:
    """Returns an address with the name of its interface; an interface alone stays as it is."""
    name = _interface_of(address)
    return address if name in (None, address) else f"{address} ({name})"


def _why_taken(port: int) -> str | None:
    """Returns the reason why a port cannot be bound, None if it is free.

    A bind to all addresses fails where another program listens on any one of them, by IPv4 or by IPv6.
    """
    for family in _FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
                probe.listen()
        except OSError as error:
            if error.errno not in _NO_IPV6:
                return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return None


def check_jax(deadline_s: float = _JAX_DEADLINE_S) -> Finding:
    """Start JAX, and compare the devices that it sees with those of the host."""
    installed = installed_accelerators()
    if (both := two_cudas(installed)) is not None:
        return _problem(*_text_and_remedy(both))
    try:
        done = subprocess.run(
            python_module(_PROBES, _PROBE_JAX),
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "end other programs that hold the devices (a TPU belongs to one process), or look at their driver"
        return _problem(f"JAX has not started within {deadline_s:.0f} s", remedy, starts=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return _broken_jax(lines[-1][:_LONGEST_REASON] if lines else f"code {done.returncode}")

    seen = json.loads(done.stdout.splitlines()[-1])
    plugins = {PACKAGES[name][0]: number for name, number in installed.items()}
    figures = {**seen, "plugins": plugins, "starts": True}
    if seen["platform"] == CPU:
        complaint = lines[-1][:_LONGEST_REASON] if any("plugin" in line for line in lines) else None
        if (idle := idle_plugin(os.environ, complaint)) is not None:
            return _problem(*_text_and_remedy(idle), **figures)
    if (package := _hanging_nccl()) is not None:
        text = f"{package} {_HANGING_NCCL} is installed, with which pipelines over several GPUs hang"
        return _problem(text, f"{sys.executable} -m pip install '{package}>{_HANGING_NCCL}'", **figures)
    number = seen["num_devices"]
    versions = {"jax": seen["jax"], "jaxlib": seen["jaxlib"], **plugins}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    devices = f"{number} {seen['platform']} device{'' if number == 1 else 's'} ({', '.join(seen['kinds'])})"
    return _ok(f"{devices}; {packages}", **figures)


def _broken_jax(reason: str) -> Finding:
    """Returns the problem of a JAX that does not start."""
    complaint = reason.removeprefix("RuntimeError: ")
    is_of_plugin = complaint.startswith("Unable to initialize backend")
    if is_of_plugin and (idle := idle_plugin(os.environ, complaint)) is not None:
        return _problem(*_text_and_remedy(idle), starts=False)
    install = install_command(find_hardware().accelerator)
    return _problem(f"JAX does not start: {reason}", f"install it anew: {install}", starts=False)


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
        return _warning("not tried, since JAX does not start", "see above")
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    options = [*_LAUNCH, "--", _PROBES, _PROBE_RANK]
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
            return _problem(f"two ranks were not done after {deadline_s:g} s", by_hand)
        except BaseException:
            launcher.kill()
            raise
    if launcher.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no word"]
        reason = next((line for line in lines if "error:" in line or "Error" in line), lines[-1])[:_LONGEST_REASON]
        text = f"two ranks did not come to run a step, code {launcher.returncode}: {reason}"
        return _problem(text, by_hand, code=launcher.returncode)
    took_s = time.monotonic() - started_s
    return _ok(f"started, met and ran steps together, in {took_s:.0f} s", seconds=round(took_s, 1))


def _start_jax() -> int:
    """Start JAX and print its platform, devices and versions."""
    import jax

    devices = jax.devices()
    kinds = list(dict.fromkeys(device.device_kind for device in devices))
    seen = {"platform": devices[0].platform, "num_devices": len(devices), "kinds": kinds}
    print(json.dumps({**seen, "jax": jax.__version__, "jaxlib": version("jaxlib")}))
    return 0


def _run_rank() -> int:
    """Run this rank's stage of a small emulated pipeline."""
    from rrfp_jax.cluster import ClusterConfig

    process = enter(num_stages=2, configuration={}, cluster=ClusterConfig(), platform="cpu")

    import numpy as np

    from rrfp_jax.core import Agreement, Ordering, StepRules
    from rrfp_jax.schedules import chain, linear
    from rrfp_jax.testing import emulate

    graph = chain(2, 4)
    order = Ordering(hint="bf").resolve(linear(2), graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL), members=process.members())
    emulate(arbiters, np.ones((2, graph.num_chunks, graph.num_microbatches, 3)), 2, process=process)
    process.finish()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == [_PROBE_JAX]:
        sys.exit(_start_jax())  # unguarded: its errors are read from the last line of its traceback
    run_command(_run_rank if sys.argv[1:] == [_PROBE_RANK] else main)
