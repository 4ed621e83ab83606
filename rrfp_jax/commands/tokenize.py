"""Make a token set of text, JSON lines or Parquet, to train on; or a tokenizer of them.

::

    rrfp tokenize my_texts --out runs/tokens --tokenizer train --vocab-size 4096
    rrfp tokenize shards --out runs/tokens --tokenizer llama --workers 8
    rrfp tokenize --show runs/tokens --document 3
    rrfp tokenize --train my_texts --out runs/tokenizer.json --vocab-size 4096

Killed and started again, it continues the work that was done. The same files and options give the same bytes, for any
number of workers."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rrfp_jax.commands.common.console import make_console, say, show_text
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.exit_codes import DONE, PEER_LOST
from rrfp_jax.readable import format_bytes, parse_bytes
from rrfp_jax.records import to_plain

if TYPE_CHECKING:
    from rrfp_jax.data.tokenizing import TokenizeOptions


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        _check_action(arguments)
        if arguments.show is not None:
            return _show(arguments.show, arguments.document or 0, is_json=arguments.json)
        if arguments.check is not None:
            return _check(arguments.check)
        options = _options(arguments)

    from rrfp_jax.data.tokenizing import WorkerLost

    started_s = time.monotonic()
    try:
        with _WorkReport(make_console(is_quiet=arguments.json), _WORDS) as report, checking_input():
            return (_train if arguments.train else _tokenize)(arguments, options, report, started_s)
    except WorkerLost as lost:
        print(f"error: {lost}", file=sys.stderr)
        return PEER_LOST
    except KeyboardInterrupt as interrupt:
        if not arguments.train:
            interrupt.add_note("what is done is kept: the same command goes on with it")
        raise


_MOST_SHOWN = 1 << 20
"""Largest number of tokens of a document that are put on a screen."""
_WORDS = {
    "reading": "reading the files",
    "training": "making the tokenizer",
    "tokenizing": "tokenising",
    "writing": "writing the token set",
}


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("tokenize", __doc__, usage="%(prog)s FILE|FOLDER ... --out DIR [option ...]")
    add = parser.add_argument
    add("inputs", nargs="*", metavar="FILE|FOLDER", help="text, JSON lines or Parquet, in this order, also compressed")
    add("--out", metavar="PATH", help="the token set's new folder, or with --train the tokenizer's new file (required)")
    add("--workers", type=int, metavar="N", help="processes that tokenise (default: as many as cores)")
    add = parser.add_argument_group("texts").add_argument
    add(
        "--column",
        default="text",
        metavar="NAME",
        help="the field of JSON lines and Parquet rows with the text or the messages",
    )
    add("--suffixes", metavar="S,S,...", help="endings of plain text files (default: .txt,.text,.md,.rst,.py)")
    add = parser.add_argument_group("tokenizer").add_argument
    named = add(
        "--tokenizer",
        default="bytes",
        metavar="FILE|train|bytes",
        help="a tokenizer.json or its folder; a byte-level BPE made of these texts; or their bytes (default bytes)",
    )
    offer(named, ("train", "bytes"))
    add("--vocab-size", type=int, metavar="N", help="tokens of one that is made (default 8192)")
    add("--train-on", default="512MiB", metavar="SIZE", help="make it of at most so much text, spread over all")
    add(
        "--end-of-document",
        metavar="TOKEN",
        help="the token of the FILE that closes a document (default: the eos_token beside it, or a usual one)",
    )
    add("--read-special", action="store_true", help="take what looks like a special token in a text for one")
    add = parser.add_argument_group("in place of a token set").add_argument
    add("--train", action="store_true", help="make the tokenizer alone, as the file --out")
    add("--show", metavar="PATH", help="print a document of this token set (optional)")
    add("--document", type=int, metavar="N", help="which one, from 0 (default 0)")
    add("--check", metavar="PATH", help="read this token set whole, and compare it with its digests (optional)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _check_action(arguments: argparse.Namespace) -> None:
    """Raise ValueError for arguments that do not go together."""
    actions = [f"--{name}" for name in ("train", "show", "check") if getattr(arguments, name) not in (None, False)]
    if len(actions) > 1:
        raise ValueError(f"{' and '.join(actions)} do different things: give one of them")
    if arguments.document is not None and arguments.show is None:
        raise ValueError("document says which one to show: give --show DIR with it")
    if actions and actions != ["--train"]:
        if arguments.inputs or arguments.out is not None:
            raise ValueError(f"{actions[0]} looks at a token set that is there: leave inputs and --out out")
    elif arguments.out is None:
        what = "tokenizer's new file" if arguments.train else "token set's new folder"
        raise ValueError(f"out is missing: name the {what} with --out")


def _options(arguments: argparse.Namespace) -> "TokenizeOptions":
    from rrfp_jax.data.tokenizing import TokenizeOptions

    if arguments.train and arguments.tokenizer not in ("bytes", "train"):
        raise ValueError("train makes a tokenizer: leave --tokenizer out")
    return TokenizeOptions(
        tokenizer="train" if arguments.train else arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        end_of_document=arguments.end_of_document,
        column=arguments.column,
        suffixes=tuple(filter(None, arguments.suffixes.split(","))) if arguments.suffixes else TokenizeOptions.suffixes,
        reads_special=arguments.read_special,
        train_bytes=parse_bytes(arguments.train_on, "train-on"),
    )


_LINE_EVERY_S = 10.0
"""How often a line tells of progress where no bar can be drawn."""


class _WorkReport:
    """A callback that takes the current part of the work, its finished and its total amount; ``words`` name the
    parts."""

    def __init__(self, console: Console, words: Mapping[str, str]) -> None:
        self._console, self._words, self._told_s = console, words, time.monotonic()
        self._totals: dict[str, int] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", visible=False)

    def __call__(self, part: str, done: int, total: int) -> None:
        if part not in self._totals:
            self._totals[part] = total
            self._bar.reset(self._task, total=total, description=self._words[part], visible=True)
        self._bar.update(self._task, completed=done)
        now_s = time.monotonic()
        if self._bar.disable and total and now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            self._console.print(f"{self._words[part]}: {done / total:.0%}")

    def total(self, part: str) -> int:
        """Returns the total amount of a part."""
        return self._totals.get(part, 0)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._bar.stop()


def _tokenize(arguments: argparse.Namespace, options: "TokenizeOptions", report: _WorkReport, started_s: float) -> int:
    from rrfp_jax.data.tokenizing import tokenize

    header = tokenize(arguments.inputs, arguments.out, options, workers=arguments.workers, progress=report)
    if arguments.json:
        print(json.dumps({"out": arguments.out, "header": to_plain(header)}), flush=True)
        return DONE
    report.say(
        f"{arguments.out}: {header.num_documents:,} documents, {header.num_tokens:,} tokens of {header.tokenizer.name} "
        f"(vocabulary {header.vocab_size:,}), of {format_bytes(report.total('reading'))} in files, "
        f"in {time.monotonic() - started_s:.1f} s"
    )
    for note in filter(None, (header.unknown_note, header.counted_note)):
        report.say(note)
    return DONE


def _train(arguments: argparse.Namespace, options: "TokenizeOptions", report: _WorkReport, _: float) -> int:
    from rrfp_jax.data.tokenizing import train_tokenizer_file

    size = train_tokenizer_file(arguments.inputs, arguments.out, options, workers=arguments.workers, progress=report)
    if arguments.json:
        print(json.dumps({"out": arguments.out, "vocab_size": size}), flush=True)
    report.say(f"{arguments.out}: a byte-level BPE of {size:,} tokens")
    return DONE


def _show(path: str, number: int, *, is_json: bool) -> int:
    from rrfp_jax.data.tokens import TokenSet

    with TokenSet(path) as tokens:
        if not 0 <= number < tokens.num_documents:
            raise ValueError(f"{path} has {tokens.num_documents} documents: give --document from 0, less than that")
        start, stop = tokens.document(number)
        shown = tokens.tokens(start, min(stop - 1, start + _MOST_SHOWN))
        text, header = tokens.decode(shown), tokens.header
    if is_json:
        told = {"header": to_plain(header), "document": number, "num_tokens": stop - start, "text": text}
        print(json.dumps(told), flush=True)
        return DONE
    say(
        f"{path}: {header.num_documents:,} documents, {header.num_tokens:,} tokens of {header.tokenizer.name} "
        f"(vocabulary {header.vocab_size:,}); document {number}, {stop - start:,} tokens"
        f"{'' if len(shown) == stop - start - 1 else f', the first {_MOST_SHOWN:,}'}:\n"
    )
    show_text(text)
    return DONE


def _check(path: str) -> int:
    from rrfp_jax.data.tokens import TokenSet

    with TokenSet(Path(path)) as tokens:
        tokens.check()
        print(f"{path}: {tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens, as they were written")
    return DONE


if __name__ == "__main__":
    run_command(main)
