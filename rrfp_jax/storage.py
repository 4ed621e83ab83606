"""Files and folders in object stores, as paths: ``s3://``, ``gs://`` and whatever else fsspec reaches.

An object store has neither folders nor renames nor locks. It has objects, which are there as a whole or not at all, and
writes that make an object only if there is none (*create-only*). So whoever commits something writes its parts first,
and last one object that names them, create-only; and takers of a lock make numbered objects, each number once.

:class:`BucketPath` is a path whose methods work on objects, so that code which only reads and writes whole files need
not know where they are. Nothing here is cached. What needs a local file, by ``open`` or ``os``, is refused in one
sentence; :func:`local_copy` makes one.
"""

import errno
import io
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import quote

from rrfp_jax.record_files import LARGEST_RECORD_BYTES, read_record

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_OPTIONS = {scheme: {"max_concurrency": 2} for scheme in ("s3", "s3a")}  # parts of a file in memory, 50 MiB each
STORE_FAILED = "the object store refused or failed"
"""Words of every error after which it is not known what the store holds."""
_READ_BYTES = 8 << 20
"""Bytes of one request by those who read a file from begin to end."""
_NUM_AT_A_TIME = 4
"""Files under way at a time, a part or two of each in memory."""


def located(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a file or a folder, a :class:`BucketPath` if it names one in an object store."""
    if isinstance(path, BucketPath):
        return path
    text = os.fspath(path)
    match = _SCHEME.match(text)  # with one slash it has been a Path
    return Path(text) if match is None else BucketPath(text)


class BucketPath(PosixPath):
    """A file or a folder in an object store.

    A folder is there while an object is below it. Errors are OSErrors with ``strerror``, whatever library raised them.
    """

    def __str__(self) -> str:
        return _SCHEME.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        raise ValueError(f"{self} is in an object store, and only a local file does here: copy it to a disk")

    @property
    def scheme(self) -> str:
        """The scheme, such as ``s3``."""
        return self.parts[0].removesuffix(":")

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        store = _store(self.scheme, os.getpid())  # clients do not outlive a fork
        try:
            return getattr(store, method)(*args, **options)
        except Exception as error:  # also those of a library that fsspec calls
            raise _as_os_error(error, str(self)) from error

    # -- as of any path ----------------------------------------------------------------------------------------------

    def absolute(self) -> "BucketPath":
        """Returns the path itself."""
        return self

    def expanduser(self) -> "BucketPath":
        """Returns the path itself."""
        return self

    def resolve(self, *_: Any) -> "BucketPath":
        """Returns the path itself."""
        return self

    def is_absolute(self) -> bool:
        """Returns True: it has its scheme."""
        return True

    def is_symlink(self) -> bool:
        """Returns False, as there are no links."""
        return False

    def _kind(self) -> str | None:
        try:
            return str(self._call("info", str(self))["type"])
        except FileNotFoundError:
            return None

    def exists(self, **_: Any) -> bool:
        """Returns whether there is an object of this name or below it."""
        return self._kind() is not None

    def is_file(self, **_: Any) -> bool:
        """Returns whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        """Returns whether there are objects below this name."""
        return self._kind() == "directory"

    def iterdir(self) -> Iterator["BucketPath"]:  # type: ignore[override]
        """Yields the files and folders of a folder, in the order of their names."""
        found = {str(entry["name"]).strip("/") for entry in self._call("ls", str(self), detail=True)}
        # some stores show a folder as an empty object of its own name
        yield from (self / name.rpartition("/")[2] for name in sorted(found - {self._key()}))

    def _key(self) -> str:
        """Returns the name by which the store knows it."""
        return str(_store(self.scheme, os.getpid())._strip_protocol(str(self))).strip("/")

    def glob(self, pattern: str, **_: Any) -> Iterator["BucketPath"]:  # type: ignore[override]
        """Yields the files and folders below this folder whose paths match, each part by itself."""
        first, _slash, rest = pattern.partition("/")
        with suppress(FileNotFoundError):
            for entry in list(self.iterdir()):
                if entry.match(first):
                    yield from entry.glob(rest) if rest else (entry,)

    def open(self, mode: str = "r", *_: Any, encoding: Any = None, **__: Any) -> Any:
        """Opens an object for reading, from begin to end or by ranges."""
        if set(mode) - set("rbt"):
            raise ValueError(f"{self} is in an object store, where a file is written as a whole: use write_bytes")
        file = io.BufferedReader(_Ranges(self), _READ_BYTES)
        return file if "b" in mode else io.TextIOWrapper(file, encoding)

    def read_bytes(self) -> bytes:
        """Returns the bytes of an object."""
        return bytes(self._call("cat_file", str(self)))

    def read_range(self, start: int, stop: int) -> bytes:
        """Returns bytes ``start`` to ``stop - 1``, which must be there."""
        data = bytes(self._call("cat_file", str(self), start=start, end=stop)) if start < stop else b""
        if len(data) != stop - start:
            raise OSError(errno.EIO, "it has become shorter", str(self))
        return data

    def stat(self, **_: Any) -> os.stat_result:
        """Returns a status in which only kind, size and time of the last write count, the last by the store's clock."""
        info = self._call("info", str(self))
        if info["type"] == "directory":
            return os.stat_result((0o040700, *[0] * 9))
        when: Any = info.get("LastModified")  # which S3 tells at once
        if when is None:
            when = self._call("modified", str(self))
        return os.stat_result((0o100600, 0, 0, 0, 0, 0, int(info["size"]), *[when.timestamp()] * 3))

    def put(self, data: bytes, *, create: bool = False) -> None:
        """Writes an object as a whole; with ``create`` only if there is none, or raises FileExistsError.

        Whoever creates must write bytes that nobody else writes: an object with the same bytes counts as written, since
        the answer to a request that the store has done may be lost, and the request be sent again.
        """
        try:
            self._call("pipe_file", str(self), data, mode="create" if create else "overwrite")
        except OSError as error:
            found = None
            if create:
                with suppress(FileNotFoundError):
                    found = self.read_bytes()
            if found is None:
                raise
            if found != data:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self)) from error

    def write_bytes(self, data: Any) -> int:
        """Writes an object as a whole."""
        self.put(bytes(data))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object."""
        try:
            self._call("rm_file", str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Does nothing: a folder is there with its first object."""

    def rmdir(self) -> None:
        """Does nothing: a folder goes with its last object."""

    # -- trees -------------------------------------------------------------------------------------------------------

    def remove_tree(self) -> None:
        """Removes all objects below this name."""
        with suppress(FileNotFoundError):
            self._call("rm", str(self), recursive=True)

    def files(self) -> dict[str, int]:
        """Returns the sizes of all objects below this name, by relative path."""
        try:
            found = self._call("find", str(self), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._key()) + 1
        names = {str(name).strip("/")[start:]: int(entry["size"]) for name, entry in found.items()}
        return {name: size for name, size in sorted(names.items()) if name}

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Writes local files, named by their paths in ``folder``, below this name."""
        _each(lambda name: self._call("put_file", str(folder / name), f"{self}/{name}"), names)

    def download(self, folder: Path, names: Iterable[str]) -> None:
        """Copies objects, named by their paths below this name, into a local folder."""

        def one(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._call("get_file", f"{self}/{name}", str(folder / name))

        _each(one, names)


def read_stored(path: Path, most_bytes: int = LARGEST_RECORD_BYTES) -> tuple[bytes, os.stat_result]:
    """Returns bytes and status of a record's file as :func:`read_record`, also of one in an object store."""
    if not isinstance(path, BucketPath):
        return read_record(path, most_bytes)
    status = path.stat()
    if status.st_size > most_bytes or not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is no file, or too large for a record", str(path))
    return path.read_bytes(), status


class _Ranges(io.RawIOBase):
    """Reads an object by ranges."""

    def __init__(self, path: BucketPath) -> None:
        self._path, self._place, self._size = path, 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._size)
        data = self._path.read_range(self._place, max(stop, self._place))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def _each(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Does work for each name, a few at a time; raises the first error, once what is under way has ended."""
    with ThreadPoolExecutor(_NUM_AT_A_TIME, "storage") as threads:
        try:
            for done in [threads.submit(work, name) for name in names]:
                done.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


@lru_cache(maxsize=16)
def _store(scheme: str, _process: int) -> Any:
    """Returns fsspec's file system of a process; raises ValueError, with the remedy, if its package is missing."""
    import fsspec  # type: ignore[import-untyped]

    try:
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        return fsspec.filesystem(scheme, **options | _OPTIONS.get(scheme, {}))
    except ImportError as error:
        named = re.search(r"[Ii]nstall (\w+)", str(error))  # such as "Install adlfs to access ..."
        package = f"'rrfp-jax[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else named[1] if named else f"it ({error})"
        raise ValueError(f"paths that begin with {scheme}:// need another package: pip install {package}") from None
    except ValueError:
        raise ValueError(f"{scheme}:// begins no path that is known here: give s3://, gs://, or a local path") from None


def _as_os_error(error: Exception, path: str) -> OSError:
    """Returns an error of fsspec, or of a library behind it, as an OSError that says all in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    for kind, number in ((FileNotFoundError, errno.ENOENT), (FileExistsError, errno.EEXIST)):
        if isinstance(error, kind):
            return kind(number, text if "bucket does not" in text else os.strerror(number), path)
    text = f"{STORE_FAILED} ({text[:300]})"
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, text, path)
    return OSError(getattr(error, "errno", None) or errno.EIO, text, path)


def check_bucket(path: BucketPath, what: str) -> None:
    """Raises ValueError, with the remedy, unless objects below ``path`` can be made, once each, listed, read and
    removed. Nothing is left behind that can be removed."""
    probe = path / f".{secrets.token_hex(8)}.tmp"
    try:
        probe.put(b"first", create=True)
        try:
            try:
                probe.put(b"second", create=True)
            except FileExistsError:
                is_kept = True
            else:
                is_kept = False
            list(path.iterdir())
        finally:  # some credentials write and delete, but do not list
            probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{what} {path} cannot be used ({error.strerror}): check the name of the bucket, and that your credentials "
            "let you list, read, write and delete there"
        ) from None
    if not is_kept:
        raise ValueError(
            f"{what} {path}: this store has no conditional writes, so that two runs would not see each other: name a "
            "folder on a disk, or another store"
        )


@cache
def local_copy(path: Path) -> Path:
    """Returns a file or a folder on a disk as it is, and of one in an object store a copy, which goes with the process.

    Raises OSError.
    """
    if not isinstance(path, BucketPath):
        return path
    folder = temporary_folder()
    if path.is_file():
        path.parent.download(folder, [path.name])
        return folder / path.name
    path.download(folder / path.name, path.files())
    return folder / path.name


def temporary_folder(owner: Any = os) -> Path:
    """Returns a new folder that goes with its owner, or with the process."""
    made = tempfile.mkdtemp(prefix="rrfp-")
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def working_folder(path: BucketPath) -> Path:
    """Returns the local folder that stands for one in an object store, for files that grow or are large."""
    # In one name, so that no folder of a run lies in that of another.
    return Path("runs", path.scheme, quote("/".join(path.parts[1:]), safe="")).absolute()


def move_up(folder: Path, path: BucketPath, *, last: Iterable[str] = ()) -> None:
    """Moves the files of a local folder below ``path``, those of the names in ``last`` at the end, in this order."""
    names = [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*")) if each.is_file()]
    late = [name for end in last for name in names if name == end]
    path.upload(folder, [name for name in names if name not in late])
    for name in late:
        path.upload(folder, [name])
    shutil.rmtree(folder, ignore_errors=True)
