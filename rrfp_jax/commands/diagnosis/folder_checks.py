"""Where a run writes: its directory, and the cache of compiled programs."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.diagnosis.finding import Finding, ok, problem, warning
from rrfp_jax.observe.output_files import check_folder
from rrfp_jax.runtime.cache_directory import AUTO, VARIABLE, cache_path

_LITTLE = 1 << 30
_PROBE = b"\0" * (1 << 20)


def check_run_directory(path: Path) -> Finding:
    """Whether the run directory can be written; nothing is left there."""
    remedy = "name another one (--run-dir), or make it writable"
    try:
        free = _room_in(path, "run directory")
    except (OSError, ValueError) as error:
        return problem(str(error).removesuffix(", so name another folder"), remedy)
    text = f"{path} can be written, {format_bytes(free)} are free"
    if free < _LITTLE:
        return warning(
            f"{text}, little for checkpoints", "remove what is not needed, or name another one", free_bytes=free
        )
    return ok(text, free_bytes=free, path=str(path.absolute()))


def check_compile_cache(environ: Mapping[str, str]) -> Finding:
    """Where compiled programs are kept."""
    again = "programs would be compiled at every start"
    remedy = f"name a folder that can be written: {VARIABLE}=/absolute/path, or run.compile_cache"
    try:
        path = cache_path(environ.get(VARIABLE) or AUTO, environ.get("JAX_COMPILATION_CACHE_DIR"), environ)
        if path is None:
            return ok(f"nothing is kept here, {again}", path=None)
        free = _room_in(path, "compile cache")
    except (OSError, ValueError) as error:
        return warning(f"{error}; {again}", remedy)
    return ok(f"{path}, {format_bytes(free)} are free", path=str(path), free_bytes=free)


def _room_in(path: Path, what: str) -> int:
    """Bytes that are free there, once something could be written; raises ValueError or OSError where not."""
    check_folder(path, what)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ValueError(f"{what} {path}: nothing can be written into {nearest} ({error.strerror})") from error
    return shutil.disk_usage(nearest).free
