"""``rrfp COMMAND``: every command of the package by its name.

A command is a module with ``main(argv)`` and ``make_parser()``, beside this one or in :mod:`rrfp_jax.planner`. It is
imported when it is called, so that the others cost nothing. ``python -m experiments.COMMAND`` in the checkout is the
same."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rrfp_jax.cluster.config import RANK, SPARE
from rrfp_jax.commands.common.errors import (
    BadInput,
    end_when_told_to_stop,
    ending_at_once,
    hear_no_more,
    run_command,
    stop_requests,
)
from rrfp_jax.exit_codes import DONE, INTERNAL_ERROR, STOP_SIGNALS
from rrfp_jax.version import __version__

COMMANDS = {
    "train": "train a model through a pipeline",
    "launch": "start, watch and end the processes of a run on this host",
    "tokenize": "make a token set of text, JSON lines or Parquet, or a tokenizer of them",
    "evaluate": "the loss of a trained model on data that it was not trained on",
    "sample": "text of a trained model, from a prompt and images",
    "convert": "import a model of Hugging Face, or export a trained one",
    "plan": "from costs to the best cut, order and memory, ranked by forecast step time",
    "simulate": "the same scheduling core in virtual time, with jitter, links and any order",
    "profile": "measure what the layers of a model cost here, for plans",
    "replay": "what the stages of a run were told and what they answered",
    "doctor": "look at this host as a run would find it, and say what to mend",
    "config": "explain keys of a configuration, show presets, complete commands in a shell",
}
"""The commands, each with its purpose."""
_OF_PLANNER = ("plan", "profile")
_LOWEST = 19
"""Priority that gives way to all others."""
_REPLACED = {
    "import-hf": "rrfp convert import",
    "export-hf": "rrfp convert export",
    "completion": "rrfp config --completion",
    "schedule": "rrfp simulate --schedule NAME --show",
    "emulate": "python -m experiments.emulate in the checkout",
    "levels": "python -m experiments.levels in the checkout",
    "read": "python -m experiments.reading in the checkout",
}
"""Commands that are gone, each with the command that took its place."""


def replacement_of(name: str) -> str | None:
    """Returns a sentence that names the successor of a command that is gone; None for any other word."""
    return f"{name!r} is no command any more: give {_REPLACED[name]}" if name in _REPLACED else None


def module_of(name: str) -> str:
    """Returns the module of a command; a name that is no command is returned unchanged, as the name of a module."""
    if name not in COMMANDS:
        return name
    return f"rrfp_jax.{'planner' if name in _OF_PLANNER else 'commands'}.{name}"


def run(name: str, argv: list[str] | None = None) -> NoReturn:
    """Run a command and end the process with its code."""
    _open_standard_streams()
    with ending_at_once():
        # Signals are taken before anything is imported that takes long. A launcher holds those for its ranks back until
        # they have these handlers.
        if name == "train":
            stop_requests()
        elif name == "launch":
            end_when_told_to_stop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *STOP_SIGNALS})

    def command() -> int:
        with ending_at_once():
            if os.environ.pop(SPARE, None):
                _await_place(module_of(name))
            main: Callable[[list[str] | None], int] = import_module(module_of(name)).main
        return main(argv)

    try:
        run_command(command)
    finally:
        hear_no_more()


def _await_place(module: str) -> None:
    """Import all that the command will need, and wait until the launcher gives this spare process a place in its run.

    Devices are left alone. The place adds variables, none of which is read by an import.
    """

    def load() -> None:
        # The run goes on beside this. Only this thread steps back, for good: no process may raise its own priority.
        if sys.platform == "linux":  # elsewhere threads have no priority of this kind
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        try:
            for needed in (module, "rrfp_jax.commands.training.assembly"):
                import_module(needed)
        except BaseException:  # perhaps a file that was just being written: a new process will see
            os._exit(INTERNAL_ERROR)

    _weigh_session(_LOWEST)
    loading = threading.Thread(target=load)
    loading.start()
    told = sys.stdin.buffer.read()
    if not told:  # the launcher needs it no more
        os._exit(DONE)
    threading.Thread(target=_weigh_session, args=(0,), daemon=True).start()
    loading.join()
    os.environ |= json.loads(told)
    # Others still see the variables of the start, so the name tells the rank.
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rrfp-rank-{os.environ[RANK]}", encoding="ascii")
    with open(os.devnull, "rb") as nowhere:
        os.dup2(nowhere.fileno(), 0)


def _weigh_session(priority: int) -> None:
    """Give this process's session a priority, where the system weighs sessions and not threads."""
    path = Path("/proc/self/autogroup")
    with suppress(OSError):
        while path.exists():
            try:
                path.write_text(str(priority), encoding="ascii")
                return
            except BlockingIOError:  # the system takes ten a second
                time.sleep(0.05)


def main() -> NoReturn:
    """Run the command that the first argument names."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run(name, rest)
    _open_standard_streams()
    run_command(lambda: _answer(name))


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that the process was started without (``>&-``).

    Otherwise the next file or socket that is opened gets the number of that stream, and every print writes into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _answer(word: str) -> int:
    if word in ("-h", "--help"):
        from rrfp_jax.commands.common.options import wrap

        column = max(map(len, COMMANDS)) + 4
        lines = ["usage: rrfp COMMAND [option ...]", ""]
        for name, purpose in COMMANDS.items():
            lines += wrap(purpose, indent=" " * column, start=f"  {name}".ljust(column))
        closing = (
            "rrfp COMMAND --help lists the options of a command, with examples. rrfp --version prints the version."
        )
        print("\n".join([*lines, "", *wrap(closing)]))
    elif word == "--version":
        print(__version__)
    elif (advice := replacement_of(word)) is not None:
        raise BadInput(advice)
    else:
        import difflib

        near = difflib.get_close_matches(word, COMMANDS, n=1)
        advice = f"did you mean {near[0]}" if near else f"the commands are {', '.join(COMMANDS)}"
        raise BadInput(f"{word!r} is no command: {advice}")
    return 0


if __name__ == "__main__":
    main()
