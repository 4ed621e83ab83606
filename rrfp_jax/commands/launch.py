"""Start the processes of a run on this machine, watch them, and end them together.

::

    rrfp launch --processes 4 -- train --config cpu/four_processes
    rrfp launch --new-key run.key
    rrfp launch --nodes 2 --node-rank 0 --head HOST0:8476 --processes 8 -- \\
        train --config gpu/two_nodes_16

The words after ``--`` are a command of ``rrfp``, or a module as for ``python -m``, and its arguments; every rank runs
it. A module in the current folder is found after all others, so that no file there takes the place of another module.
Lines come out as ``[rank 2] ...``. Where standard output is no terminal it is rank 0's alone, unchanged, so that its
``--json`` can be read by a program; everything else goes to the errors (``--prefix always`` and ``never`` change that).

When a rank fails, the others have ``--grace-s`` to end by themselves; the launcher returns the code of the rank that
failed first for a reason of its own (128 + n where signal n killed it). SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2
are passed on; Ctrl-C after one of them ends all ranks at once. ``--max-restarts`` starts all of them again, with
another key and other ports, unless the input was bad, the user interrupted, or the launcher itself was told to stop.
Where the others go on without a rank, and save their state, that rank alone is started again. With ``--nodes 4,2`` the
run goes on with 2 hosts while not all 4 are there: ``train`` then has half the replicas. When the others are back, its
ranks save, and start again on all.

Each rank keeps to its share of the cores that the launcher may use, unless ``--bind none`` is given.

Over several hosts, run it on each with the same ``--nodes``, ``--head`` and run key (``RRFP_RUN_KEY`` or
``RRFP_RUN_KEY_FILE``; ``--new-key FILE`` makes one) and its own ``--node-rank``. With ``--from-environment`` everything
but the key comes from the system that starts one launcher on each node (SLURM, SkyPilot, Kubeflow, Open MPI), or from
the variables that users of JAX set. Where SLURM, Kubernetes or Open MPI start the ranks, run it once beside rank 0 with
``--supervise --processes ALL --head HOST:PORT``.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rrfp_jax.cluster import RunKey
from rrfp_jax.cluster.child_processes import Output
from rrfp_jax.cluster.config import BINDINGS, INTERFACE, OWN_COMMANDS, PREFIXES, Address, LaunchSettings
from rrfp_jax.cluster.host import await_name, listens_on, require_descriptors
from rrfp_jax.cluster.launcher import launch
from rrfp_jax.cluster.scheduler_env import NodePlace
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.main import COMMANDS, replacement_of

_FILES_OF_A_RANK, _FILES_OF_A_SPARE = 2, 3
"""The standard streams that are pipes, of a rank and of the process that may take its place."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.new_key is not None:
        with checking_input():
            RunKey.generate().write(Path(arguments.new_key))
        return 0
    with checking_input():
        output = Output(sys.stdout.buffer, sys.stderr.buffer, prefix=arguments.prefix)
        settings = _settings(arguments, os.environ, output)
        if arguments.from_environment and settings.head is not None and settings.interface is None:
            await_name(settings.head.host, settings.start_deadline_s, output.say)
        listens_on(settings)
        shared = RunKey.from_environment() if settings.shares_key else None
        num_started = 0 if settings.supervises else settings.num_processes
        files = _FILES_OF_A_RANK + (_FILES_OF_A_SPARE if settings.max_restarts else 0)
        require_descriptors(files * num_started, "a launcher and its ranks")
    return launch(settings, os.environ, output, shared=shared)


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = _Parser("launch", __doc__, usage="%(prog)s --processes N [option ...] -- COMMAND [argument ...]")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="ranks on each node (required, but for --new-key and where --from-environment finds it)",
    )
    command = parser.add_argument(
        "command", nargs="*", metavar="COMMAND ...", help="what every rank runs, and its arguments"
    )
    offer(command, COMMANDS)
    ends = parser.add_argument_group("how it ends")
    ends.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="how often the ranks are started again after a failure"
    )
    ends.add_argument(
        "--grace-s",
        type=float,
        default=LaunchSettings.grace_s,
        metavar="S",
        help="seconds for the others to end by themselves after the first failure; more than silence_deadline_s",
    )
    ends.add_argument(
        "--start-deadline-s",
        type=float,
        default=LaunchSettings.start_deadline_s,
        metavar="S",
        help="seconds for all ranks to come together",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--prefix",
        choices=PREFIXES,
        default="auto",
        help="whether [rank N] stands before each line; auto: unless it is rank 0's output to a program",
    )
    several = parser.add_argument_group("several hosts")
    several.add_argument(
        "--nodes",
        metavar="N[,M...]",
        help="hosts of the run, each with its own launcher (default 1); with 4,2 the run goes on with 2, and half the "
        "replicas, where 4 are not there",
    )
    several.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="which of the hosts this is, 0 to N-1; node 0 hosts the head (default 0)",
    )
    several.add_argument("--head", metavar="HOST:PORT", help="node 0's address; the port after this one is used too")
    several.add_argument(
        "--interface", metavar="IF", help="what to listen on (default: RRFP_INTERFACE; else what reaches the head)"
    )
    several.add_argument(
        "--from-environment",
        action="store_true",
        help="take what is not given of --nodes, --node-rank, --head and --processes from the variables of Open MPI, "
        "SkyPilot, SLURM, Kubeflow, JAX or Kubernetes; the run key comes from RRFP_RUN_KEY or RRFP_RUN_KEY_FILE",
    )
    several.add_argument("--supervise", action="store_true", help="start no ranks, only host what they need")
    several.add_argument("--new-key", metavar="FILE", help="write a new run key to FILE and end")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--threads", type=int, metavar="N", help="XLA's CPU threads in each process (default: NPROC if set, else 8)"
    )
    machine.add_argument(
        "--bind",
        choices=BINDINGS,
        default=LaunchSettings.bind,
        help="cores: each rank keeps to its share of the cores that the launcher may use, and its threads do not "
        "preempt each other (Linux; other systems bind nothing); none: neither",
    )
    return parser


class _Parser(CommandParser):
    def _not_known(self, word: str) -> str:
        return f"{super()._not_known(word)}; what is for the ranks' command stands behind --"


def _settings(arguments: argparse.Namespace, environ: Mapping[str, str], output: Output) -> LaunchSettings:
    place = _placement(arguments, environ, output)
    if place.num_processes is None:
        raise ValueError("how many processes? give --processes N")
    command = tuple(arguments.command)
    if arguments.supervise and command:
        raise ValueError(f"--supervise starts no ranks: leave out '{command[0]}', or --supervise")
    if not arguments.supervise:
        command = _module_and_arguments(command)
    return LaunchSettings(
        command=command,
        num_processes=place.num_processes,
        num_nodes=1 if place.num_nodes is None else place.num_nodes,
        fewer_nodes=_node_counts(arguments)[1:],
        node_rank=place.node_rank or 0,
        head=place.head,
        interface=arguments.interface or environ.get(INTERFACE) or None,
        max_restarts=arguments.max_restarts,
        grace_s=arguments.grace_s,
        start_deadline_s=arguments.start_deadline_s,
        prefix=arguments.prefix,
        threads=arguments.threads,
        bind=arguments.bind,
    )


def _placement(arguments: argparse.Namespace, environ: Mapping[str, str], output: Output) -> NodePlace:
    given = NodePlace(
        num_nodes=next(iter(_node_counts(arguments)), None),
        node_rank=arguments.node_rank,
        head=None if arguments.head is None else Address.parse(arguments.head),
        num_processes=arguments.processes,
    )
    if not arguments.from_environment:
        return given
    if arguments.supervise:
        raise ValueError("a supervisor has no node to look for: leave out --from-environment, or --supervise")
    place, told = given.completed(environ)
    output.say(told)
    return place


def _node_counts(arguments: argparse.Namespace) -> tuple[int, ...]:
    try:
        return tuple(map(int, arguments.nodes.split(","))) if arguments.nodes else ()
    except ValueError:
        raise ValueError(f"--nodes {arguments.nodes} is no number of hosts: give one, or several as 4,2") from None


def _module_and_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command:
        raise ValueError("what to run? give it after --, for example -- train --config run.yaml")
    if command[0] in COMMANDS:
        return (OWN_COMMANDS, *command)
    if (advice := replacement_of(command[0])) is not None:
        raise ValueError(advice)
    with suppress(FileNotFoundError):  # the current folder, which ranks search last, may be gone
        sys.path.append(os.getcwd())
    try:
        found = importlib.util.find_spec(command[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ValueError(f"there is no command and no module '{command[0]}' to run: name one, for example train")
    # The checkout's experiments.train is the command train; another project may have a module of this name.
    name = command[0].removeprefix("experiments.")
    if name in COMMANDS and found.origin == str(Path(__file__).parents[2] / "experiments" / f"{name}.py"):
        return (OWN_COMMANDS, name, *command[1:])
    return command


if __name__ == "__main__":
    run_command(main)
