"""Compare ``rrfp tokenize`` with the ``tokenizers`` library alone, on the same text and cores.

::

    python -m experiments.bench_tokenize --mib 100 --repeats 3

The text is that of the running Python's own files and packages, a document for each file, as JSON lines. The library's
``encode_batch`` and ``encode_batch_fast`` are given documents that are in memory already, a thousand at a time, with
their threads on; ours reads the file, takes its digest, and writes a token set, with as many processes as there are
cores. They run in turn; medians are printed, and the ratio of our speed to theirs.
"""

import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import BadInput, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.data.tokenizer_files import load, threads_of_tokenizers
from rrfp_jax.data.tokenizing import TokenizeOptions, tokenize, train_tokenizer_file

_BATCH = 1000
VOCAB_SIZE = 8192


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    if min(arguments.mib, arguments.repeats) < 1:
        raise BadInput("mib and repeats: give at least 1")
    bench_tokenize(make_console(), mib=arguments.mib, repeats=arguments.repeats)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_tokenize", __doc__)
    parser.add_argument("--mib", type=int, default=100, metavar="N", help="how much text, in MiB, if there is as much")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each")
    return parser


def bench_tokenize(console: Console, *, mib: int = 100, repeats: int = 3) -> None:
    """Prints seconds and megabytes per second of all three, and the ratios."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = list(_texts(mib * 2**20))
        lines = folder / "texts.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        train_on = TokenizeOptions(tokenizer="train", vocab_size=VOCAB_SIZE, train_bytes=8 * 2**20)
        train_tokenizer_file([lines], folder / "tokenizer.json", train_on)
        seconds = _in_turn(texts, folder, repeats)
    num_bytes = sum(len(text.encode()) for text in texts)
    table = make_table(
        f"{len(texts):,} documents, {num_bytes / 1e6:.0f} MB, medians of {repeats} runs",
        *("", "seconds", "MB/s", "ours reaches"),
        numeric=True,
    )
    ours_s = median(seconds[_OURS])
    for name, runs in seconds.items():
        took_s = median(runs)
        table.add_row(name, f"{took_s:.1f}", f"{num_bytes / 1e6 / took_s:.2f}", f"{took_s / ours_s:.2f}")
    console.print(table)


_OURS = "rrfp tokenize"


def _in_turn(texts: list[str], folder: Path, repeats: int) -> dict[str, list[float]]:
    tokenizer = load((folder / "tokenizer.json").read_bytes(), "tokenizer.json")
    batches = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
    options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"))
    seconds: dict[str, list[float]] = {}
    for number in range(repeats):
        out = folder / f"set{number}"
        ways: dict[str, Callable[[], object]] = {
            "encode_batch": partial(_encode_all, tokenizer.encode_batch, batches),
            "encode_batch_fast": partial(_encode_all, tokenizer.encode_batch_fast, batches),
            _OURS: partial(tokenize, [folder / "texts.jsonl"], out, options),
        }
        for name, way in ways.items():
            start = time.perf_counter()
            with threads_of_tokenizers(True):
                way()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    return seconds


def _encode_all(encode: Callable[..., object], batches: list[list[str]]) -> None:
    """Encodes all batches and drops the tokens: those of all texts at once take gigabytes."""
    for batch in batches:
        encode(batch, add_special_tokens=False)


def _texts(num_bytes: int) -> Iterator[str]:
    """Yields the text files of this Python and its packages, until there is enough text."""
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in (".py", ".pyi", ".txt", ".rst", ".md", ".h", ".json") and path.is_file():
                text = path.read_text(errors="replace")[: 1 << 20]
                num_bytes -= len(text.encode())
                yield text
                if num_bytes <= 0:
                    return


if __name__ == "__main__":
    run_command(main)
