"""Run code that a configuration names only if the command line names it too, or says that the file is trusted.

A configuration, and the ``config.yaml`` of a run's folder, may come from somebody else. Reading them as data does no
harm, so every function that would load code for them asks first.
"""

from argparse import ArgumentParser
from collections.abc import Container, Iterator, Mapping
from typing import Any

from rrfp_jax.schedules.registry import is_in_file

FLAG = "--trust"
_OF_PATHS = ("_dir", "_directory", "_file", "_files", "_path", "_paths", "_to")
"""Endings of the names of XLA's flags whose values are files or folders, such as that of the compiler which XLA
calls."""


def add_trust_argument(parser: ArgumentParser) -> None:
    """Add the option that lets a command run the code that its configuration names."""
    parser.add_argument(
        FLAG,
        action="store_true",
        help="run the code that the configuration names: a data set, schedule or hint of one's own; "
        "without it only what options name is run",
    )


def refuse_code(path: str, sections: Mapping[str, Mapping[str, Any]], given: Container[str]) -> None:
    """Raise ValueError if the file ``path`` names code; ``given`` are the keys that options have given."""
    for key, value in _code_in(sections):
        if key not in given:
            flag = f"--{key.replace('_', '-')}"
            of_set = key.startswith("evaluation.sets")
            named = "" if of_set else f"give {flag} {value} to run that, or "
            raise ValueError(
                f"{path} names code to run, {key} {value}: {named}{'give ' if of_set else ''}{FLAG} to run all that it "
                "names"
            )


def _code_in(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the keys of a configuration's plain data that name code, with their values."""
    if "object" in sections["data"]:
        yield "data.object", sections["data"]["object"]
    for name, differences in ((sections.get("evaluation") or {}).get("sets") or {}).items():
        if "object" in differences:
            yield f"evaluation.sets.{name}.object", differences["object"]
    for key in ("schedule", "hint"):
        value = sections["pipeline"][key]
        if value is not None and is_in_file(value):
            yield f"pipeline.{key}", value
    for flag in sections["run"]["xla_flags"]:
        name, _, value = flag.partition("=")
        if "/" in value or name.endswith(_OF_PATHS):
            yield "run.xla_flags", flag
