"""Look at this host as a run would find it: devices, limits, memory, network, folders, and two ranks that start.

::

    rrfp doctor
    rrfp doctor --head HOST0:8476 --run-dir /shared/runs

With ``--head`` run it on each of several hosts. One line per check: ok, warning or problem, and the action to take.
Ends with 0 where there is no problem, else with 2. Nothing is left behind, and nothing is waited for without a
deadline.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from rrfp_jax.cluster.config import INTERFACE, Address
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.diagnosis import Finding, Status, guarded, host, network, processes
from rrfp_jax.exit_codes import BAD_INPUT, DONE

_PORT = 8476
_DEADLINE_S = 15.0
"""For each check but those that start processes, which have deadlines of their own."""
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
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
    console.print(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
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
    add("--head", metavar="HOST:PORT", help="node 0's address, as for launch: check that it can be reached")
    add("--interface", metavar="IF", help="the interface for ranks to listen on (default: the one to the head)")
    add("--port", type=int, metavar="N", help=f"the first of the two ports of a head on this host (default {_PORT})")
    return parser


def _findings(arguments: argparse.Namespace, head: Address | None) -> Iterator[tuple[str, Finding]]:
    """Yields each finding as soon as it is made, because the slow checks come first and last."""
    port = head.port if head is not None else arguments.port or _PORT
    is_requested = head is not None or arguments.port is not None
    interface = arguments.interface or os.environ.get(INTERFACE) or None
    yield "versions", guarded(processes.check_versions)
    hardware = guarded(host.check_hardware)
    yield "accelerators", hardware
    jax = guarded(processes.check_jax)
    yield "JAX", jax
    quick: dict[str, Callable[[], Finding]] = {
        "cores": host.check_cores,
        "memory": host.check_memory,
        "shared memory": lambda: host.check_shared_memory(has_gpu=hardware.figures.get("driver") is not None),
        "open files": host.check_open_files,
        "interfaces": lambda: network.check_interfaces(head, interface),
        "host name": network.check_host_name,
        **({} if head is None else {"head": lambda: network.check_head(head, interface)}),
        "ports": lambda: network.check_ports(head, port, is_requested=is_requested),
        "run directory": lambda: host.check_run_directory(Path(arguments.run_dir)),
        "compile cache": lambda: host.check_compile_cache(os.environ),
    }
    for name, check in quick.items():
        yield name, guarded(check, deadline_s=_DEADLINE_S)
    if not arguments.no_start:
        starts = bool(jax.figures.get("starts"))
        yield "two ranks", guarded(lambda: processes.check_start(jax_starts=starts))


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    run_command(main)
