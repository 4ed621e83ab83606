"""Tokenizers, files of the ``tokenizers`` library or nothing but the bytes of UTF-8, and the tokens that numbers mean.

A text is tokenised as it stands: settings of the file for cutting, padding, dropping merges at random, or tokens that
open a text are not applied, for those are no part of the text.

A data set has a kind of tokens, and so has a model: an import by the tokenizer that came with it, a run by the data
that it was trained on; both must agree. Two kinds are the same if one tokenizer made them. The tokenizer's file may be
written in another way, as by a library that saves it again: only the way it cuts a text, and the number of each token,
count.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rrfp_jax.data.tokens import BYTE_TOKENIZER, TOKENIZER, FileDigest, TokenizerName, megatron_prefix, read_header
from rrfp_jax.record_files import parse_json, read_bounded, read_record
from rrfp_jax.storage import local_copy, located

TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
MODEL_FILES = ("generation_config.json", "config.json")
"""Files of a model that name the tokens at which it ends a text."""
_INNER = ("", "hugging-face", "tokenizer")  # places of tokenizer.json in a folder of the hub, of an import and of a run
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_MOST_BYTES, _MOST_GROWTH = 1 << 27, 100
_THREADS = "TOKENIZERS_PARALLELISM"
# Parts of a tokenizer.json that do not decide which tokens a text has.
_NOT_OF_TOKENS = ("version", "truncation", "padding", "post_processor", "decoder")


def library_reason(error: BaseException) -> str:
    """Returns the first line of a message of a library in Rust; raises any other error again.

    Such a library raises Exception, or PanicException, which is no Exception, if its own code has given up: for example
    a pattern that takes too many steps on a text.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return next(iter(str(error).splitlines()), type(error).__name__)


class TokenizerFile(NamedTuple):
    """A tokenizer that can be used."""

    name: str
    data: bytes | None
    """The bytes of tokenizer.json. None: tokens are bytes."""
    end_of_document: int
    vocab_size: int
    unknown: int | None = None
    """The token that stands for text without a token. None: there is no such token."""


BYTE_TOKENIZER_FILE = TokenizerFile(BYTE_TOKENIZER.name, None, end_of_document=0, vocab_size=256)
"""The tokenizer of bytes; the zero byte closes a document."""


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """Returns the tokenizer.json that a path names: a file, or the folder of a model, an import or a run."""
    named = Path(path).expanduser()
    if not named.is_dir():
        return named
    return next((file for inner in _INNER if (file := named / inner / TOKENIZER).is_file()), named / TOKENIZER)


def read_tokenizer(path: str | os.PathLike[str], end_of_document: str | None) -> TokenizerFile:
    """Returns the tokenizer in a file, or in a folder that has a tokenizer.json.

    ``end_of_document`` is the token that closes documents; None: the ``eos_token`` of tokenizer_config.json beside,
    else the one that the model's own files beside name, else a usual one that the tokenizer has. Raises ValueError,
    with the remedy, if there is no such file or token.
    """
    file = tokenizer_file(path)
    try:
        data = read_bounded(file, _MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(f"tokenizer {file} does not exist: name a tokenizer.json, train, or bytes") from None
    except OSError as error:
        raise ValueError(
            f"tokenizer {file} cannot be read ({error.strerror}): make it readable, or name another"
        ) from None
    tokenizer = load(data, str(file))
    end = _end_of_document_in(tokenizer, file, end_of_document)
    return TokenizerFile(file.name, data, end, size_of(tokenizer), unknown_of(tokenizer))


def load(data: bytes, name: str) -> Any:
    """Returns the ``tokenizers.Tokenizer`` of a tokenizer.json, without settings for more than a text's own tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode())
        growth = _growth(tokenizer)
    except BaseException as error:
        reason = library_reason(error)
        raise ValueError(f"{name} is no file of the tokenizers library ({reason}): name a tokenizer.json") from None
    if growth > _MOST_GROWTH:
        raise ValueError(f"{name} writes {growth} letters for one before it makes tokens: name another tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _growth(tokenizer: Any) -> int:
    """Returns the most letters that a tokenizer may put in the place of one; a few lines of its file make millions."""
    growth = 1
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    waiting = [parse_json(part.__getstate__()) for part in parts if part is not None]
    while waiting:
        step = waiting.pop()
        for name in ("normalizers", "pretokenizers", "decoders"):
            waiting += step.get(name) or []
        if step.get("type") == "Replace":
            pattern = step.get("pattern") or {}
            growth *= max(1, -(-len(step.get("content") or "") // len(pattern.get("String") or " ")))
    return growth


def size_of(tokenizer: Any) -> int:
    """Returns one more than the largest token."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def _end_of_document_in(tokenizer: Any, file: Path, named: str | None) -> int:
    """Returns the number of the token that closes documents; arguments as in :func:`read_tokenizer`."""
    if named is not None:
        number = tokenizer.token_to_id(named)
        if number is None:
            raise ValueError(f"{file} has no token {named!r}: name one of its tokens with --end-of-document")
        return number
    configured = named_token(object_in(file.parent / TOKENIZER_CONFIG), "eos_token")
    if configured is not None:
        number = tokenizer.token_to_id(configured)
        if number is None:
            raise ValueError(
                f"{file.parent / TOKENIZER_CONFIG} says that eos_token is {configured!r}, which {file} does not have: "
                "mend it, or name one of its tokens with --end-of-document"
            )
        return number
    if ends := ends_of_model(file.parent):
        if tokenizer.id_to_token(ends[0]) is None:
            raise ValueError(
                f"the model in {file.parent} ends at token {ends[0]}, which {file} does not have: give files that "
                "belong together, or name one of its tokens with --end-of-document"
            )
        return ends[0]
    found = next((number for token in _USUAL_ENDS if (number := tokenizer.token_to_id(token)) is not None), None)
    if found is None:
        raise ValueError(
            f"{file} does not say which token closes a document, and has none of {', '.join(_USUAL_ENDS)}: name one of "
            "its tokens with --end-of-document"
        )
    return found


def ends_of_model(folder: Path) -> tuple[int, ...]:
    """Returns the tokens at which the model in ``folder`` ends a text, by its files; empty if they do not say."""
    ends: dict[int, None] = {}
    for content in (object_in(folder / name) for name in MODEL_FILES):
        text = content.get("text_config")
        found = content.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ends |= dict.fromkeys(each for each in (found if isinstance(found, list) else [found]) if type(each) is int)
    return tuple(ends)


def unknown_of(tokenizer: Any) -> int | None:
    """Returns the token that stands for text without a token; None if there is no such token."""
    model = json.loads(tokenizer.to_str())["model"]
    name = model.get("unk_token")
    number: int | None = model.get("unk_id") if name is None else tokenizer.token_to_id(name)
    return number


def may_lose(tokenizer: Any) -> bool:
    """Returns whether characters can vanish without a trace: neither an unknown token nor bytes stand for them."""
    from tokenizers.pre_tokenizers import ByteLevel

    parts = json.loads(tokenizer.to_str())
    model, before = parts["model"], json.dumps([parts["pre_tokenizer"], parts["normalizer"]])
    if model["type"] != "BPE" or model.get("unk_token") is not None:
        return False  # other models raise, or have a token for the unknown
    names = model["vocab"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return False
    return '"ByteLevel"' not in before or not all(character in names for character in ByteLevel.alphabet())


def lost_part(tokenizer: Any, text: str, encoded: Any, unknown: int | None) -> str | None:
    """Returns the first part of a text that its tokens do not stand for; None if there is none.

    Text that the tokenizer leaves out on purpose is not lost.
    """

    def is_kept(character: str) -> bool:
        # Anything may be stripped before a text becomes tokens: accents, for one.
        normal = character if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(character)
        return bool(normal.strip())

    is_covered = [character.isspace() for character in text]
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token == unknown and start < end:
            return text[start:end]
        is_covered[start:end] = [True] * (end - start)
    missing = (text[at] for at, covered in enumerate(is_covered) if not covered)
    lost = next((character for character in missing if is_kept(character)), None)
    if lost is None:
        return None
    # The library counts on past a character that it drops: the offsets tell that one is lost, but not which.
    alone = (each for each in dict.fromkeys(text) if is_kept(each))
    return next((each for each in alone if not tokenizer.encode(each, add_special_tokens=False).ids), lost)


def named_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Returns a token that tokenizer_config.json names, such as ``eos_token``; None if it does not."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def object_in(path: Path) -> dict[str, Any]:
    """Returns the object in a file of JSON; empty if the file is missing or holds none."""
    try:
        content = parse_json(read_record(path)[0])
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def threads_of_tokenizers(are_on: bool) -> Iterator[None]:
    """Switches the ``tokenizers`` library's own threads on or off in the block."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "true" if are_on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


# --------------------------------------------------------------------------------------------------- kinds of tokens


@dataclass(frozen=True, kw_only=True)
class TokenKind:
    """The tokens that numbers stand for."""

    tokenizer: TokenizerName
    """The tokenizer that made them."""
    ends: tuple[int, ...] = ()
    """Tokens at which a text ends; the first of them closes the documents of a data set."""
    file: Path | None = None
    """The tokenizer.json. None: tokens are bytes."""

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte of UTF-8."""
        return self.tokenizer.sha256 is None

    def is_same(self, other: "TokenKind") -> bool:
        """Returns whether numbers stand for the same tokens in both kinds."""
        if self.tokenizer.sha256 == other.tokenizer.sha256:
            return True
        if self.file is None or other.file is None:
            return False
        mine, theirs = _token_parts(self.file), _token_parts(other.file)
        return mine is not None and mine == theirs

    def __str__(self) -> str:
        return "bytes" if self.is_bytes else f"those of the tokenizer {self.file or self.tokenizer.name}"


BYTE_TOKENS = TokenKind(tokenizer=BYTE_TOKENIZER)
"""The kind of tokens that are bytes; none of them ends a text."""


def kind_of_file(file: Path, ends: tuple[int, ...] = ()) -> TokenKind:
    """Returns the kind of a tokenizer.json; raises ValueError, with the remedy, if the file cannot be read."""
    try:
        digest = FileDigest.of_file(file).sha256
    except OSError as error:
        raise ValueError(
            f"tokenizer {file} cannot be read ({error.strerror}): make it readable, or name another"
        ) from None
    return TokenKind(tokenizer=TokenizerName(name=TOKENIZER, sha256=digest), ends=ends, file=file)


def kind_of_tokens(path: str | os.PathLike[str], tokenizer: str | None) -> TokenKind:
    """Returns the kind of the tokens at a path: of a token set, or of files of Megatron, which ``tokenizer`` made.

    Raises ValueError, with the remedy, if a file cannot be read.
    """
    if megatron_prefix(path) is not None:
        if tokenizer is None or tokenizer == BYTE_TOKENIZER.name:
            return TokenKind(tokenizer=BYTE_TOKENIZER, ends=(BYTE_TOKENIZER_FILE.end_of_document,), file=None)
        return kind_of_file(tokenizer_file(tokenizer), (read_tokenizer(tokenizer, None).end_of_document,))
    folder = located(path).expanduser()
    header, _ = read_header(folder)
    file = None if header.tokenizer.sha256 is None else local_copy(folder / TOKENIZER)
    return TokenKind(tokenizer=header.tokenizer, ends=(header.end_of_document,), file=file)


@lru_cache(maxsize=8)
def _token_parts(file: Path) -> str | None:
    """Returns the parts that decide tokens, as text that is the same however the file is written.

    Returns None if the file holds no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        # The library reads older forms of the file, such as merges as text, and writes its own form.
        parts = json.loads(Tokenizer.from_str(file.read_text(encoding="utf-8")).to_str())
    except BaseException as error:
        library_reason(error)
        return None
    return json.dumps({name: part for name, part in parts.items() if name not in _NOT_OF_TOKENS}, sort_keys=True)
