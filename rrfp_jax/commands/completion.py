"""Print what a shell needs to complete the commands, their options, and the values that are known by name.

::

    rrfp completion bash >~/.local/share/bash-completion/completions/rrfp
    rrfp completion zsh >~/.zfunc/_rrfp    # with fpath+=~/.zfunc before compinit
    rrfp completion fish >~/.config/fish/completions/rrfp.fish

The text is made once and starts no Python when a key is pressed; make it anew after an update. A new shell reads it.
bash also completes the command that stands behind ``rrfp launch ... --``.
"""

import argparse
from importlib import import_module
from shlex import join

from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.common.options import CommandParser, takes_file, values_of
from rrfp_jax.commands.main import COMMANDS, module_of
from rrfp_jax.exit_codes import DONE

SHELLS = ("bash", "zsh", "fish")
_LAUNCHED = """
# What stands behind "rrfp launch ... --" is completed as a command line of its own.
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
    print(script(arguments.shell))
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS), help="the shell to complete in")
    return parser


def script(shell: str) -> str:
    """The completion script of a shell for all commands."""
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
    """What may stand for an option, as shtab wants it for each shell; None: what argparse itself knows, or nothing."""
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
    name = f"_rrfp_words_or_file_{shtab.sha(words)}"  # by this name the script tells names of files from others
    body = f'compgen -W "{words}" -- "$1"; compgen -f -- "$1"'
    return {
        "bash": name,
        "zsh": f"{{compadd {words}; _files}}",
        "fish": f"{words} {shtab.FILE['fish']}",
        "preamble": {"bash": f"{name}() {{ {body}; }}"},
    }


if __name__ == "__main__":
    run_command(main)
