"""Makes a token set of files of documents when they are first seen, and keeps it in the user's cache folder.

The folder of a token set there is named by a digest of all that decides it: the contents and names of the files, the
tokenizer and the column. So files that change, or another tokenizer, give another token set, and a folder of files that
was only moved does not. One process tokenises; others that need the same set wait for it, and go on where it stopped if
it dies.
"""

import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp_jax.data._pieces import try_lock
from rrfp_jax.data._sources import LINES, ROWS, Source, check_inside, find_sources
from rrfp_jax.data.config import JsonlConfig, ParquetConfig, TokensConfig
from rrfp_jax.data.sample_order import TRAIN, Part
from rrfp_jax.data.token_data import Tokens
from rrfp_jax.data.tokenizer_files import CHAT_TEMPLATE, MODEL_FILES, TOKENIZER_CONFIG, tokenizer_file
from rrfp_jax.data.tokenizing import PLAIN_BYTES, TokenizeOptions, tokenize
from rrfp_jax.data.tokens import HEADER

_VERSION = 1  # part of the digest; to be raised when the same files would give other tokens
_KINDS = {JsonlConfig: (LINES, "JSON lines (.jsonl)"), ParquetConfig: (ROWS, "Parquet (.parquet) or Arrow (.arrow)")}
_LOOK_EVERY_S = 0.2
_SAY_EVERY_S = 60.0
_WAIT_MINUTES = 240.0
"""How long a process waits for another one that tokenises the same files."""

Say = Callable[[str], None]
"""Gets a sentence about work that takes long."""


def tokens_of_files(config: JsonlConfig | ParquetConfig, part: Part = TRAIN, *, say: Say) -> Tokens:
    """Returns the data set of these files, which are tokenised now if they never were.

    Raises ValueError, with the remedy, naming file and row, if they cannot be, if the wait for another process has
    taken too long, and as :class:`Tokens` does.
    """
    sources = _sources(config)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(config.cache).expanduser() if config.cache is not None else Path(home, "rrfp", "tokens")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder {cache} for tokens ({error.strerror}): name another one with cache"
        ) from None
    options = TokenizeOptions(
        tokenizer=config.tokenizer or PLAIN_BYTES, end_of_document=config.end_of_document, column=config.column
    )
    target = cache.absolute() / _digest_of_all(sources, options, cache)
    if not (target / HEADER).is_file():
        with _set_locked(target, _WAIT_MINUTES, say):
            if not (target / HEADER).is_file():  # another process may have made it meanwhile
                say(f"tokenising {len(sources)} files into {target}, once for all later starts")
                tokenize([source.path for source in sources], target, options)
    names = ("length", "batch_size", "num_microbatches", "pack", "held_out", "seed")
    return Tokens(TokensConfig(path=(str(target),), **{name: getattr(config, name) for name in names}), part)


def _sources(config: JsonlConfig | ParquetConfig) -> list[Source]:
    """Returns the files to read, in order; raises ValueError if there are none, or if one is of another kind."""
    kind, kind_name = _KINDS[type(config)]
    found: list[Source] = []
    for pattern in config.path:
        given = os.path.expanduser(pattern)
        paths = [given]
        if glob.has_magic(given) and not os.path.exists(given):
            paths = sorted(glob.glob(given, recursive=True))
            if not paths:
                raise ValueError(f"no file matches {pattern}: give the paths of existing files")
            for link in map(Path, paths):
                if link.is_symlink() and link.is_file():  # nobody has named this file itself
                    check_inside(link, link.parent)
        for path in paths:
            own = [source for source in find_sources([path], ())[0] if source.kind == kind]
            if not own:
                raise ValueError(f"{path} holds no {kind_name}: give other files, or another section for them")
            found += own
    return found


def _digest_of_all(sources: Sequence[Source], options: TokenizeOptions, cache: Path) -> str:
    files = []
    if options.tokenizer != PLAIN_BYTES:  # and all files that may say how a chat is written, and which token closes it
        file = tokenizer_file(options.tokenizer)
        files = [file, *(file.with_name(name) for name in (TOKENIZER_CONFIG, *MODEL_FILES, CHAT_TEMPLATE))]
    content = [
        _VERSION,
        [(source.name, source.kind, _digest(source.path, cache)) for source in sources],
        [_digest(str(file), cache) for file in files if file.is_file()],
        [options.column, options.end_of_document],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _digest(path: str, cache: Path) -> str:
    """Returns the SHA-256 of a file, by a note of an earlier start if the file has not been changed since."""
    try:
        status = os.stat(path)
        stamp = json.dumps([os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ino])
        note = cache / "digests" / hashlib.sha256(stamp.encode()).hexdigest()[:32]
        with suppress(OSError, UnicodeDecodeError):
            if len(known := note.read_text()) == 64:
                return known
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): make it readable, or leave it out") from None
    with suppress(OSError):  # it is only slower without
        note.parent.mkdir(exist_ok=True)
        temporary = note.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_text(digest)
        os.replace(temporary, note)
    return digest


@contextmanager
def _set_locked(target: Path, wait_minutes: float, say: Say) -> Iterator[None]:
    """Holds the lock of a token set for the block; the lock ends with its process."""
    began_s, said_s = time.monotonic(), None
    with target.with_suffix(".lock").open("w") as lock:
        while True:
            if try_lock(lock, "name a cache on another one, or tokenize the files with rrfp tokenize before training"):
                break
            waited_s = time.monotonic() - began_s
            if waited_s > 60 * wait_minutes:
                raise ValueError(
                    f"another process has been tokenising into {target} for {wait_minutes:g} minutes: look at that "
                    "one, or tokenize the files with rrfp tokenize before training"
                )
            if said_s is None or waited_s - said_s > _SAY_EVERY_S:
                said_s = waited_s
                say(f"waiting for another process, which tokenises into {target} ({waited_s:.0f} s)")
            time.sleep(_LOOK_EVERY_S)
        yield
