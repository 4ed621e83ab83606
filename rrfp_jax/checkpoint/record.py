"""The records that make a directory a committed step.

::

    step_00000010/
        commit.json            names the data and the parts; without it, or damaged, nothing here counts
        data-1f3c09a2/         one attempt at saving the step
            embedding/         a part: an Orbax checkpoint, named after its first layer
            embedding.json     what the part consists of: arrays, and every file with its checksum

``commit.json`` is written last, by one process, in one piece, with checksums of the parts' records and of itself. So a
step is committed as a whole or not at all, whichever process is killed when. A second attempt at the same step, or a
process of an earlier run that has not died yet, writes to another ``data-...`` directory.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from rrfp_jax.checkpoint.arrays import Name
from rrfp_jax.checkpoint.durable_files import FileSum, canonical_json, sum_file, write_whole
from rrfp_jax.record_files import parse_json, read_record

FORMAT, VERSION = "rrfp-jax checkpoint", 1
COMMIT = "commit.json"
_STEP = re.compile(r"step_(\d{8,})")
_DATA = "data-[0-9a-f]+"
_ENTRY = re.compile(rf"{_DATA}|{re.escape(COMMIT)}(\.[0-9a-f]+\.tmp)?")


class Unusable(ValueError):
    """A checkpoint that cannot be restored, at all or in this run; the message says in one sentence why."""


def _inside(path: str) -> str:
    """A path below a directory, which it does not leave."""
    if "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError("leads elsewhere")
    return path


def _name(name: str) -> str:
    if "/" in name:
        raise ValueError("is no name")
    return _inside(name)


# A checksum shows that a record is as it was written, not who wrote it: so its form is looked at too.


class PartRecord(BaseModel, frozen=True, strict=True):
    """What a part consists of."""

    layers: tuple[str, ...]
    arrays: tuple[tuple[Name, str, tuple[int, ...]], ...]
    """Name, dtype and shape of every array that has elements."""
    files: dict[Annotated[str, AfterValidator(_inside)], FileSum]
    """By path relative to the part's directory."""

    def write(self, path: Path) -> str:
        """Write the record, and return its checksum."""
        data = canonical_json(self.model_dump())
        write_whole(path, data)
        return hashlib.sha256(data).hexdigest()

    @classmethod
    def read(cls, path: Path, checksum: str) -> "PartRecord":
        """Read what :meth:`write` wrote; raises Unusable for anything else."""
        try:
            data, _ = read_record(path)
        except OSError as error:
            raise Unusable(f"{path.name} cannot be read ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != checksum:
            raise Unusable(f"{path.name} is damaged")
        try:
            return cls.model_validate_json(data)
        except ValueError:
            raise Unusable(f"{path.name} is malformed") from None


class Commit(BaseModel, frozen=True, strict=True):
    """What ``commit.json`` says."""

    step: int
    data: Annotated[str, Field(pattern=f"^{_DATA}$")]
    """Name of the directory with the parts."""
    parts: dict[Annotated[str, AfterValidator(_name)], str]
    """Checksum of every part's record."""
    layout: dict[str, Any]
    """How the run that saved was laid out; for people."""
    host: dict[str, Any]
    """What the run keeps beside arrays."""

    def write(self, directory: Path) -> None:
        """Commit the step."""
        content = {"format": FORMAT, "version": VERSION, **dict(self)}
        data = {"content": content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()}
        write_whole(directory / COMMIT, json.dumps(data, indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> "Commit":
        """Read what :meth:`write` wrote; raises Unusable for anything else."""
        try:
            data = parse_json(read_record(directory / COMMIT)[0])
            content: Any = data.get("content") if isinstance(data, dict) else None
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise Unusable("it is no checkpoint of this package")
            is_whole = hashlib.sha256(canonical_json(content)).hexdigest() == data.get("sha256")
        except FileNotFoundError:
            raise Unusable("it was never committed") from None
        except OSError as error:
            raise Unusable(f"{COMMIT} cannot be read ({error.strerror})") from None
        except Unusable:
            raise
        except ValueError:  # invalid JSON, invalid numbers, or too deep
            is_whole = False
        if not is_whole:
            raise Unusable(f"{COMMIT} is damaged")
        if content.get("version") != VERSION:
            raise Unusable(f"it has format version {content.get('version')}, this package reads {VERSION}")
        try:
            commit = cls.model_validate(content)
        except ValueError:
            raise Unusable(f"{COMMIT} is malformed") from None
        if step_of(directory) != commit.step:
            raise Unusable(f"it is a copy of step {commit.step} under another name")
        return commit


def step_directory(root: Path, step: int) -> Path:
    """Where a step is kept."""
    return root / f"step_{step:08d}"


def step_of(directory: Path) -> int | None:
    """The step that a directory's name says, or None."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def is_ours(path: Path) -> bool:
    """Whether a step's directory, or an entry of it, is what this package puts there, so that it may be removed.

    A symbolic link is not: what it shows belongs to somebody else.
    """
    if path.is_symlink():
        return False
    if step_of(path) is not None:
        return path.is_dir() and all(is_ours(entry) for entry in path.iterdir())
    return _ENTRY.fullmatch(path.name) is not None


def last_committed(root: Path) -> int | None:
    """The newest step that is committed; whether its files are whole is not looked at."""
    return next((step for step in steps_in(root) if is_committed(root, step)), None)


def is_committed(root: Path, step: int, data: str | None = None) -> bool:
    """Whether a step is committed; with ``data``, by this very attempt."""
    try:
        found = Commit.read(step_directory(root, step)).data
    except Unusable:
        return False
    return data is None or found == data


def steps_in(root: Path) -> list[int]:
    """The steps that directories are named after, newest first."""
    if not root.is_dir():
        return []
    steps = {step_of(entry) for entry in root.iterdir() if entry.is_dir()}
    return sorted((step for step in steps if step is not None), reverse=True)


def check_file(path: Path, expected: FileSum) -> str | None:
    """What is wrong with a file, or None."""
    try:
        found = sum_file(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found.num_bytes != expected.num_bytes:
        return f"has {found.num_bytes} bytes instead of {expected.num_bytes}"
    return None if found == expected else "is damaged"
