"""Explain the keys of a configuration, show the presets, and print the completion script of a shell.

::

    rrfp config --explain pipeline.window
    rrfp config --explain optimizer --config cpu/debug
    rrfp config --list
    rrfp config --show cpu/debug >mine.yaml
    rrfp config --completion bash \\
        >~/.local/share/bash-completion/completions/rrfp
    rrfp config --completion zsh >~/.zfunc/_rrfp
    rrfp config --completion fish >~/.config/fish/completions/rrfp.fish

A key is named with its section, or alone where only one section has it; a section alone explains all its keys.
``--list`` names the presets, each with its purpose; ``--show`` prints one as it lies in its file, comments included, to
start a file of one's own from. ``rrfp train --config X --print-config`` prints the configuration that a run would use.

``--completion`` prints a script that completes the commands, their options, and the values that are known by name. The
script starts no Python when a key is pressed, so make it anew after an update. A new shell reads it (zsh with
``fpath+=~/.zfunc`` before ``compinit``). bash also
completes the command behind ``rrfp launch ... --``.
"""

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from shlex import join
from typing import Any

from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import (
    CommandParser,
    as_text,
    field_texts,
    field_words,
    flag_of,
    offer,
    takes_file,
    values_of,
    whole_flag,
    wrap,
)
from rrfp_jax.commands.main import COMMANDS, module_of
from rrfp_jax.commands.training.config import QUALIFIED, SECTIONS, choices_of_options, in_one_line, read_train_config
from rrfp_jax.commands.training.config_sources import find_preset, preset_names, summary_of
from rrfp_jax.exit_codes import DONE
from rrfp_jax.record_files import read_yaml

Given = tuple[str, Mapping[str, Mapping[str, Any]]]
"""The name of a configuration, and its sections with their keys."""
_HEAD_WIDTH = 10
SHELLS = ("bash", "zsh", "fish")
_LAUNCHED = """
# The words behind "rrfp launch ... --" are completed as a command line of their own.
_rrfp() {
  local i words=("${COMP_WORDS[@]}") cword=$COMP_CWORD
  for ((i = 2; i < cword; i++)); do
    if [[ ${words[1]} == launch && ${words[i]} == -- ]]; then
      local COMP_WORDS=("${words[0]}" "${words[@]:i+1}") COMP_CWORD=$((cword - i))
      break
    fi
  done
  _shtab_rrfp
}
complete -o bashdefault -F _rrfp rrfp
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        text = _text(arguments)
    print(text.rstrip("\n"))
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    usage = "%(prog)s --explain KEY [--config FILE.yaml] | --list | --show NAME | --completion SHELL"
    parser = CommandParser("config", __doc__, usage=usage)
    which = parser.add_mutually_exclusive_group(required=True)
    key = which.add_argument("--explain", metavar="KEY", help="explain a key, such as pipeline.window, or a section")
    which.add_argument("--list", action="store_true", help="name the presets, each with its purpose")
    preset = which.add_argument("--show", metavar="NAME", help="print the file of a preset, such as cpu/debug")
    which.add_argument(
        "--completion",
        choices=SHELLS,
        metavar="|".join(SHELLS),
        help="print the script that completes rrfp in this shell",
    )
    file = parser.add_argument(
        "--config", metavar="FILE.yaml", help="with --explain, also print the value of the key in this file, or preset"
    )
    offer(key, all_names())
    for each in (preset, file):
        offer(each, preset_names())
    return parser


def _text(arguments: argparse.Namespace) -> str:
    if arguments.explain is None and arguments.config is not None:
        raise ValueError("--config says what a file gives a key: give --explain KEY too")
    if arguments.completion is not None:
        return completion_script(arguments.completion)
    if arguments.list:
        names = preset_names()
        column = max(map(len, names)) + 2
        lines = (wrap(summary_of(name), indent=" " * column, start=name.ljust(column)) for name in names)
        return "\n".join("\n".join(of_preset) for of_preset in lines)
    if arguments.show is not None:
        return find_preset(arguments.show).read_text(encoding="utf-8")
    section, key = find_key(arguments.explain)
    given = None if arguments.config is None else (arguments.config, read_train_config(arguments.config, {}).as_dict())
    return explain_section(section, given) if key is None else explain_key(section, key, given)


# -- keys in words -----------------------------------------------------------------------------------------------------


def all_names() -> list[str]:
    """Returns the sections, and all keys with theirs."""
    return [*SECTIONS, *(f"{section}.{key}" for section in SECTIONS for key in _keys(section))]


def find_key(name: str) -> tuple[str, str | None]:
    """Returns section and key that a user means; the key is None for a section.

    Raises ValueError on a name that is none, with the nearest, and on a key that several sections have.
    """
    section, dot, key = name.lstrip("-").replace("-", "_").partition(".")
    if not dot and section in SECTIONS:
        return section, None
    if not dot:
        key, owners = section, [each for each in SECTIONS if section in _keys(each)]
        if not owners:
            every = [*SECTIONS, *dict.fromkeys(each for section in SECTIONS for each in _keys(section))]
            raise ValueError(f"{key!r} is no key and no section: {_nearest(key, every)}")
        if len(owners) > 1:
            names = ", ".join(f"{section}.{key}" for section in owners)
            raise ValueError(f"{key!r} is a key of several sections: name one of {names}")
        return owners[0], key
    if section not in SECTIONS:
        raise ValueError(f"{section!r} is no section: {_nearest(section, [*SECTIONS])}")
    if key not in _keys(section):
        near = difflib.get_close_matches(key, _keys(section), n=1)
        known = f"the keys of {section} are {', '.join(_keys(section))}"
        elsewhere = [f"did you mean {other}.{key}" for other in SECTIONS if key in _keys(other)]
        advice = [*elsewhere, f"did you mean {section}.{near[0]}" if near else known]
        raise ValueError(f"{section!r} has no key {key!r}: {advice[0]}")
    return section, key


def explain_key(section: str, key: str, given: Given | None = None) -> str:
    """Returns the full explanation of one key; ``given`` adds the value of one configuration."""
    name = f"{section}.{key}"
    words = field_words(SECTIONS[section], key, choices_of_options().get(name, ()))
    rows = [("type", words.kind), ("default", words.default or "none: a file must give it")]
    if words.choices:
        rows.append(("choices", ", ".join(words.choices)))
    flags = dict.fromkeys([flag_of(SECTIONS, name, QUALIFIED), whole_flag(name)])
    rows += [("option", ", ".join(flags)), ("section", f"{section}: {field_texts(SECTIONS[section])['']}")]
    by_value: dict[str, list[str]] = {}
    for preset, sections in _presets().items():
        if (value := _value(sections, section, key)) is not None:
            by_value.setdefault(value, []).append(preset)
    of_presets = "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())
    rows.append(("presets", of_presets or "none gives it"))
    if given is not None:
        rows.append(("value", f"{_value(given[1], section, key) or f'no section {section}'} in {given[0]}"))
    lines = [name, *wrap(words.text, indent="  ", start="  "), ""]
    for head, text in rows:
        lines += wrap(text, indent=" " * (2 + _HEAD_WIDTH), start=f"  {head:<{_HEAD_WIDTH}}")
    return "\n".join(lines)


def explain_section(section: str, given: Given | None = None) -> str:
    """Returns the purpose of a section and a sentence on each key; ``given`` adds the values of one configuration."""
    lines = wrap(f"{section}: {field_texts(SECTIONS[section])['']}.")
    for key in _keys(section):
        words = field_words(SECTIONS[section], key, choices_of_options().get(f"{section}.{key}", ()))
        value = None if given is None else _value(given[1], section, key)
        here = "" if value is None or given is None else f"; {value} in {given[0]}"
        text = f"{words.short} ({words.kind}; {words.left_out}{here})."
        lines += ["", f"  {section}.{key}", *wrap(text, indent=" " * 4, start=" " * 4)]
    lines += ["", f"rrfp config --explain {section}.{_keys(section)[0]} says all about one of them."]
    lines += [f"{other}.{section} is a key of the same name." for other in SECTIONS if section in _keys(other)]
    return "\n".join(lines)


def _keys(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}" if near else f"the sections are {', '.join(SECTIONS)}"


@cache
def _presets() -> dict[str, Any]:
    return {name: read_yaml(find_preset(name).read_text(encoding="utf-8")) for name in preset_names()}


def _value(sections: Mapping[str, Mapping[str, Any]], section: str, key: str) -> str | None:
    """Returns the value as a user writes it; None if the key is not given."""
    if key not in sections.get(section, {}):
        return None
    value = sections[section][key]
    if isinstance(value, Mapping):
        return in_one_line(value)
    return as_text(value) or "an empty list"


# -- completion --------------------------------------------------------------------------------------------------------


def completion_script(shell: str) -> str:
    """Returns the script that completes all commands in a shell."""
    import shtab

    root = argparse.ArgumentParser("rrfp")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers()
    for name, purpose in COMMANDS.items():
        parser = import_module(module_of(name)).make_parser()
        for action in parser._actions:
            if (candidates := _candidates(action)) is not None:
                action.complete = candidates
        commands.add_parser(name, parents=[parser], add_help=False, help=purpose, description=purpose)
    text: str = shtab.complete(root, shell)
    return text + (_LAUNCHED if shell == "bash" else "")


def _candidates(action: argparse.Action) -> dict[str, object] | None:
    """Returns the values of an option in shtab's form for each shell; None where argparse knows them, or nobody."""
    import shtab

    values, is_file = values_of(action), takes_file(action)
    if action.choices or not (values or is_file):
        return None
    if not values:
        return dict(shtab.FILE)
    words = join(values)
    if not is_file:
        name = f"_rrfp_words_{shtab.sha(words)}"
        body = f'compgen -W "{words}" -- "$1"'
        return {"bash": name, "zsh": f"({words})", "fish": words, "preamble": {"bash": f"{name}() {{ {body}; }}"}}
    # By this name the script of shtab tells the names of files from other words.
    name = f"_rrfp_words_or_file_{shtab.sha(words)}"
    body = f'compgen -W "{words}" -- "$1"; compgen -f -- "$1"'
    return {
        "bash": name,
        "zsh": f"{{compadd {words}; _files}}",
        "fish": f"{words} {shtab.FILE['fish']}",
        "preamble": {"bash": f"{name}() {{ {body}; }}"},
    }


if __name__ == "__main__":
    run_command(main)
