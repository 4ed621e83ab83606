"""The files of a step: records with checksums, how they get to the disk, and which steps are removed.

::

    step_00000010/
        commit.json            names the data and the parts; without it, or damaged, nothing here counts
        data-1f3c09a2/         one attempt at saving the step
            embedding/         a part: an Orbax checkpoint, named after its first layer
            embedding.json     the arrays of the part, and every file with its checksum

``commit.json`` is written last, by one process, in one piece, with checksums of the parts' records and of itself. So a
step is committed as a whole or not at all, whichever process is killed when. A second attempt at the same step, or a
process of an earlier run that has not died yet, writes to another ``data-...`` directory. In an object store the record
is an object that is made once (``rrfp_jax/storage.py``); a store that does not answer is no step without a record.

A step is removed only after a newer one is committed, and always its ``commit.json`` first. Nothing is ever changed
through a symbolic link, and a directory that holds anything that is not ours is left alone.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field

from rrfp_jax.checkpoint._arrays import ArrayName
from rrfp_jax.record_files import NO_LINKS, parse_json
from rrfp_jax.storage import STORE_FAILED, BucketPath, located, read_stored

_LOG = logging.getLogger(__name__)
_FORMAT, _VERSION = "rrfp-jax checkpoint", 1
_COMMIT = "commit.json"
_STEP = re.compile(r"step_(\d{8,})")
_DATA = "data-[0-9a-f]+"
_ENTRY = re.compile(rf"{_DATA}|{re.escape(_COMMIT)}(\.[0-9a-f]+\.tmp)?")
_BLOCK_BYTES = 1 << 20


class Unusable(ValueError):
    """Raised for a checkpoint that cannot be restored, at all or in this run; the message is one sentence."""


# ------------------------------------------------------------------------------------------------------------- records


class FileSum(NamedTuple):
    """Size and checksum of a file."""

    num_bytes: int
    crc32: int


def _inside(path: str) -> str:
    """Returns a path below a directory; raises ValueError if it leaves the directory."""
    if "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError("leads elsewhere")
    return path


# A checksum shows that a record is as it was written, not who wrote it: so the records check their form, too.


class PartRecord(BaseModel, frozen=True, strict=True):
    """The content of a part."""

    layers: tuple[str, ...]
    arrays: tuple[tuple[ArrayName, str, tuple[int, ...]], ...]
    """Name, dtype and shape of every array that has elements."""
    files: dict[Annotated[str, AfterValidator(_inside)], FileSum]
    """Checksums by path relative to the part's directory."""

    def write(self, path: Path) -> str:
        """Writes the record, and returns its checksum."""
        data = canonical_json(self.model_dump())
        _write_whole(path, data)
        return hashlib.sha256(data).hexdigest()

    @classmethod
    def read(cls, path: Path, checksum: str) -> "PartRecord":
        """Returns the record that :meth:`write` wrote; raises Unusable for anything else."""
        try:
            data, _ = read_stored(path)
        except OSError as error:
            raise Unusable(f"{path.name} cannot be read ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != checksum:
            raise Unusable(f"{path.name} is damaged")
        try:
            return cls.model_validate_json(data)
        except ValueError:
            raise Unusable(f"{path.name} is malformed") from None


class Commit(BaseModel, frozen=True, strict=True):
    """The content of ``commit.json``."""

    step: int
    data: Annotated[str, Field(pattern=f"^{_DATA}$")]
    """Name of the directory with the parts."""
    parts: dict[Annotated[str, Field(pattern="^[^/]*$"), AfterValidator(_inside)], str]
    """Checksum of every part's record."""
    layout: dict[str, Any]
    """Layout of the run that saved, for people."""
    host: dict[str, Any]
    """Plain data that the run keeps beside arrays."""

    def write(self, directory: Path, *, replaces: bool = False) -> None:
        """Commits the step. Raises FileExistsError if there is a record already, unless this one ``replaces`` it."""
        content = {"format": _FORMAT, "version": _VERSION, **dict(self)}
        data = {"content": content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()}
        _write_whole(directory / _COMMIT, json.dumps(data, indent=1).encode(), replaces=replaces)

    @classmethod
    def read(cls, directory: Path) -> "Commit":
        """Returns the record that :meth:`write` wrote; raises Unusable for anything else."""
        try:
            data = parse_json(read_stored(directory / _COMMIT)[0])
            content: Any = data.get("content") if isinstance(data, dict) else None
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise Unusable("it is no checkpoint of this package")
            is_whole = hashlib.sha256(canonical_json(content)).hexdigest() == data.get("sha256")
        except FileNotFoundError:
            raise Unusable("it was never committed") from None
        except OSError as error:
            raise Unusable(f"{_COMMIT} cannot be read ({error.strerror})") from None
        except Unusable:
            raise
        except ValueError:  # invalid JSON, invalid numbers, or too deep
            is_whole = False
        if not is_whole:
            raise Unusable(f"{_COMMIT} is damaged")
        if content.get("version") != _VERSION:
            raise Unusable(f"it has format version {content.get('version')}, this package reads {_VERSION}")
        try:
            commit = cls.model_validate(content)
        except ValueError:
            raise Unusable(f"{_COMMIT} is malformed") from None
        if _step_of(directory) != commit.step:
            raise Unusable(f"it is a copy of step {commit.step} under another name")
        return commit


# --------------------------------------------------------------------------------------------------------------- steps


def step_directory(root: Path, step: int) -> Path:
    """Returns the directory of a step."""
    return located(root) / f"step_{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Returns the steps that directories are named after, newest first."""
    root = located(root)
    if not root.is_dir():
        return []
    steps = {_step_of(entry) for entry in root.iterdir() if entry.is_dir()}
    return sorted((step for step in steps if step is not None), reverse=True)


def last_committed(root: Path) -> int | None:
    """Returns the newest step that is committed, or None. Its files may be damaged all the same."""
    return next((step for step in steps_in(root) if is_committed(root, step)), None)


def is_committed(root: Path, step: int, data: str | None = None) -> bool:
    """Returns whether a step is committed; with ``data``, by this very attempt."""
    try:
        found = Commit.read(step_directory(root, step)).data
    except Unusable as problem:
        if STORE_FAILED in str(problem):
            raise
        return False
    return data is None or found == data


def remove_leftovers(root: Path) -> None:
    """Removes the files of saves that did not come to an end; called while no save is under way."""
    for directory in (step_directory(root, step) for step in steps_in(root)):
        if is_ours(directory):
            if not (directory / _COMMIT).exists():
                remove_tree(directory)
            else:
                _remove_all(_other_data(directory))


def keep_last(
    root: Path,
    step: int,
    keep: int,
    *,
    keep_also: Collection[int] = (),
    before_removal: Callable[[], None] = lambda: None,
) -> None:
    """Removes old steps after ``step`` was committed. It and the ``keep - 1`` committed steps before it stay, and so
    do those of ``keep_also`` before it.

    Steps after it belong to a run that was given up for the one that saved this step. Directories that are not ours are
    left alone, and are not counted. Nothing is removed if ``before_removal`` raises an error.
    """
    ours = [other for other in steps_in(root) if is_ours(step_directory(root, other))]
    committed = [older for older in ours if older <= step and is_committed(root, older)]
    kept = {*committed[:keep], *(older for older in committed if older in keep_also)}
    replaced = _other_data(step_directory(root, step))
    # All that is to go is known by now: what others write after this call stays.
    before_removal()
    for other in ours:
        directory = step_directory(root, other)
        if other in kept:
            continue
        if other > step:
            _LOG.warning("%s is removed: the run went on from an earlier step and has saved step %d", directory, step)
        # Without its record on the disk, a step that is half removed after a power cut is no committed step.
        (directory / _COMMIT).unlink(missing_ok=True)
        sync_directory(directory)
        remove_tree(directory)
    _remove_all(replaced)


def is_ours(path: Path) -> bool:
    """Returns whether a step's directory, or an entry of it, is of the kind that this package makes and may remove.

    A symbolic link is not: its target belongs to somebody else.
    """
    if path.is_symlink():
        return False
    if _step_of(path) is not None:
        return path.is_dir() and all(is_ours(entry) for entry in path.iterdir())
    return _ENTRY.fullmatch(path.name) is not None


def _step_of(directory: Path) -> int | None:
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def _other_data(directory: Path) -> list[Path]:
    """Returns attempts that another attempt at the same step has replaced."""
    try:
        data = Commit.read(directory).data
    except Unusable:
        return []  # damaged: whoever wants to look into it still can
    return [entry for entry in directory.iterdir() if is_ours(entry) and entry.name not in (_COMMIT, data)]


def _remove_all(entries: Iterable[Path]) -> None:
    for entry in entries:
        remove_tree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- files


def canonical_json(data: Any) -> bytes:
    """Returns the same bytes for the same data; raises ValueError for data that JSON has no form for."""
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"a checkpoint keeps plain data only (numbers, texts, lists, dictionaries): {error}") from None


def _write_whole(path: Path, data: bytes, *, replaces: bool = True) -> None:
    """Writes a file so that it is there as a whole or not at all, even after a power cut. Raises FileExistsError if
    there is one already that it may not replace."""
    if isinstance(path, BucketPath):
        path.put(data, create=not replaces)
        return
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # The second best way: another process may make the file in between.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def sync_directory(path: Path) -> None:
    """Forces the names in a directory to the disk."""
    if isinstance(path, BucketPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_tree(root: Path) -> dict[str, FileSum]:
    """Returns the checksum of every file below a directory, by relative path; all of it is forced to the disk."""
    sums: dict[str, FileSum] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            sums[path.relative_to(root).as_posix()] = _sum_file(path, sync=True)
        sync_directory(Path(folder))
    return dict(sorted(sums.items()))


def file_fault(path: Path, expected: FileSum) -> str | None:
    """Returns the difference between a file and its checksum as the end of a sentence, or None."""
    try:
        found = _sum_file(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found.num_bytes != expected.num_bytes:
        return f"has {found.num_bytes} bytes instead of {expected.num_bytes}"
    return None if found == expected else "is damaged"


def _sum_file(path: Path, *, sync: bool = False) -> FileSum:
    crc32 = num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            num_bytes += len(block)
        if sync:
            os.fsync(file.fileno())
    return FileSum(num_bytes, crc32)


def remove_tree(path: Path) -> None:
    """Removes a directory as far as possible; a process that still writes there does not stop it."""
    if isinstance(path, BucketPath):
        with suppress(OSError):
            path.remove_tree()
    else:
        shutil.rmtree(path, ignore_errors=True)
