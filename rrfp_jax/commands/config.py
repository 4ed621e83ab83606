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
from importlib import import_module
from shlex import join

from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer, takes_file, values_of, wrap
from rrfp_jax.commands.main import COMMANDS, module_of
from rrfp_jax.commands.training.config import read_train_config
from rrfp_jax.commands.training.config_sources import find_preset, preset_names, summary_of
from rrfp_jax.commands.training.explaining import all_names, explain_key, explain_section, find_key
from rrfp_jax.exit_codes import DONE

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
