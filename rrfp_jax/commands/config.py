"""What the keys of a configuration mean, and the configurations that come with the package.

::

    rrfp config --explain pipeline.window
    rrfp config --explain optimizer --config cpu/debug
    rrfp config --list
    rrfp config --show cpu/debug >mine.yaml

A key is named with its section, or alone where only one section has it; a section alone explains all its keys.
``--list`` names the presets, each with what it is; ``--show`` prints one as it lies in its file, comments included, to
start a file of one's own from. ``rrfp train --config X --print-config`` prints what options make of a configuration.
"""

import argparse

from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.help_text import wrap
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.training.config import read_train_config
from rrfp_jax.commands.training.explaining import all_names, explain_key, explain_section, find_key
from rrfp_jax.commands.training.presets import find_preset, preset_names, summary_of
from rrfp_jax.exit_codes import DONE


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        text = _text(arguments)
    print(text.rstrip("\n"))
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser(
        "config", __doc__, usage="%(prog)s --explain KEY [--config FILE.yaml] | --list | --show NAME"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    key = which.add_argument("--explain", metavar="KEY", help="say all about a key, as pipeline.window, or a section")
    which.add_argument("--list", action="store_true", help="name the presets, each with what it is")
    preset = which.add_argument("--show", metavar="NAME", help="print the file of a preset, such as cpu/debug")
    file = parser.add_argument(
        "--config", metavar="FILE.yaml", help="with --explain, also say what this file, or preset, gives the key"
    )
    offer(key, all_names())
    for each in (preset, file):
        offer(each, preset_names())
    return parser


def _text(arguments: argparse.Namespace) -> str:
    if arguments.explain is None and arguments.config is not None:
        raise ValueError("--config says what a file gives a key: give --explain KEY too")
    if arguments.list:
        return _list()
    if arguments.show is not None:
        return find_preset(arguments.show).read_text(encoding="utf-8")
    section, key = find_key(arguments.explain)
    given = None if arguments.config is None else (arguments.config, read_train_config(arguments.config, {}).as_dict())
    return explain_section(section, given) if key is None else explain_key(section, key, given)


def _list() -> str:
    names = preset_names()
    room = max(map(len, names)) + 2
    return "\n".join("\n".join(wrap(summary_of(name), indent=" " * room, start=name.ljust(room))) for name in names)


if __name__ == "__main__":
    run_command(main)
