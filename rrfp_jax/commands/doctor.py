"""Look at this host as a run would find it: devices, limits, memory, network, folders, and two ranks that start.

::

    rrfp doctor
    rrfp doctor --head HOST0:8476 --run-dir /shared/runs

With ``--head`` run it on each of several hosts. One line per check: ok, warning or problem, and what to do. Ends with 0
where there is no problem, else with 2. Nothing is left behind, and nothing is waited for without a deadline.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.diagnosis.finding import Finding, Status, guarded, within
from rrfp_jax.commands.diagnosis.folder_checks import check_compile_cache, check_run_directory
from rrfp_jax.commands.diagnosis.host_checks import (
    check_cores,
    check_hardware,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from rrfp_jax.commands.diagnosis.jax_checks import check_jax, check_versions
from rrfp_jax.commands.diagnosis.network_checks import (
    check_head,
    check_host_name,
    check_interfaces,
    check_ports,
    check_proxies,
    given_interface,
)
from rrfp_jax.commands.diagnosis.start_check import check_start
from rrfp_jax.exit_codes import BAD_INPUT, DONE
from rrfp_jax.network.config import Address

_PORT = 8476
_DEADLINE_S = 15.0
"""Of each check but those that start processes, which have deadlines of their own."""
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
        console.print(_line(name, finding), soft_wrap=True)
    counts = {status: sum(each.status is status for each in found.values()) for status in Status}
    problems, warnings = counts[Status.PROBLEM], counts[Status.WARNING]
    console.print(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    if arguments.json:
        checks = [{"check": name, **finding.as_dict()} for name, finding in found.items()]
        print(json.dumps({"problems": problems, "warnings": warnings, "checks": checks}))
    return BAD_INPUT if problems else DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("doctor", __doc__)
    parser.add_argument("--run-dir", default="runs", metavar="PATH", help="where runs are to write")
    parser.add_argument("--no-start", action="store_true", help="start no ranks, which takes some seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    several = parser.add_argument_group("several hosts")
    several.add_argument(
        "--head", metavar="HOST:PORT", help="node 0's address, as for launch: whether it can be reached"
    )
    several.add_argument(
        "--interface", metavar="IF", help="what ranks are to listen on (default: what reaches the head)"
    )
    several.add_argument(
        "--port", type=int, metavar="N", help=f"the first of the two ports of a head on this host (default {_PORT})"
    )
    return parser


def _findings(arguments: Any, head: Address | None) -> Iterator[tuple[str, Finding]]:
    port = arguments.port or _PORT if head is None else head.port
    is_asked = head is not None or arguments.port is not None
    interface = given_interface(arguments.interface, os.environ)
    yield "versions", guarded(check_versions)
    hardware = guarded(check_hardware)
    yield "accelerators", hardware
    jax = guarded(check_jax)
    yield "JAX", jax
    quick: dict[str, Callable[[], Finding]] = {
        "cores": check_cores,
        "memory": check_memory,
        "shared memory": lambda: check_shared_memory(has_gpu=hardware.figures.get("driver") is not None),
        "open files": check_open_files,
        "interfaces": lambda: check_interfaces(head, interface),
        "host name": check_host_name,
        "proxies": lambda: check_proxies(os.environ),
        **({} if head is None else {"head": lambda: check_head(head, interface)}),
        "ports": lambda: check_ports(head, port, is_asked=is_asked),
        "run directory": lambda: check_run_directory(Path(arguments.run_dir)),
        "compile cache": lambda: check_compile_cache(os.environ),
    }
    for name, check in quick.items():
        yield name, within(_DEADLINE_S, check)
    if not arguments.no_start:
        starts = bool(jax.figures.get("starts"))
        yield "two ranks", guarded(lambda: check_start(jax_starts=starts))


def _line(name: str, finding: Finding) -> Text:
    remedy = f": {finding.remedy}" if finding.remedy else ""
    return Text.assemble((f"{finding.status:<8}", _STYLES[finding.status]), f" {name:<14} {finding.text}{remedy}")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    run_command(main)
