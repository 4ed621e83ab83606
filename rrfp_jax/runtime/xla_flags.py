"""Flags of XLA that a configuration gives, put where XLA reads them before it starts.

The compiler reads ``XLA_FLAGS`` once, and that of TPUs reads ``LIBTPU_INIT_ARGS`` for its own flags
(``--xla_tpu_...``). It ends the process, without a traceback, if it does not know a flag. So each flag is looked for in
the libraries that will read it: a name that none of them holds as a string is refused beforehand.

The flags of the user's environment go before those of a configuration. Both are part of the key under which compiled
programs are kept (:mod:`rrfp_jax.runtime.compile_cache`), and processes of a run compare them at the start, as they do
JAX's own settings.
"""

import importlib.util
import mmap
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

XLA, LIBTPU = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
"""Environment variables."""
_FLAG = re.compile(r"--xla_\w+(=\S+)?")
_OF_TPUS = "--xla_tpu_"
_OF_HOST = ("--xla_force_host_platform_device_count", "--xla_dump_to")
"""What may differ from process to process."""
_LIBRARIES = {
    XLA: (("jaxlib", "libjax_common.so"), ("jax_plugins", "xla_cuda*/xla_cuda_plugin.so")),
    LIBTPU: (("libtpu", "libtpu.so"),),
}
"""By variable, which file of which package reads it."""
_OF_A_PROCESS = re.compile(
    "log|dump|cache|debug|check_|checks|guard|visible_devices|traceback|locations|explain|pprint|platform|backend|timeout"
    "|address|coordinator|process_id|num_processes|transfer_size|options|default_device|num_cpu_devices|async_dispatch"
    "|captured_constants|url_schema"
)
"""JAX's settings that may differ, because they change neither programs nor numbers, or describe the host of a
process."""


def name_of(flag: str) -> str:
    """``--xla_some`` of ``--xla_some=true``."""
    return flag.partition("=")[0]


def check_flags(flags: Sequence[str]) -> None:
    """Raise ValueError for what is no flag of XLA, or is given twice."""
    for number, flag in enumerate(flags):
        if not _FLAG.fullmatch(flag):
            raise ValueError(f"xla_flags has {flag!r}: write each as --xla_name=value")
        if name_of(flag) in map(name_of, flags[:number]):
            raise ValueError(f"xla_flags has {name_of(flag)} twice: leave one out")


def use_xla_flags(flags: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Put the flags into the environment, but for those that it has, and say whether there were any; XLA must not have
    started.

    Raises ValueError for a flag that a library which is here, and would read it, does not know.
    """
    missing = {variable: _missing(flags, variable, environ) for variable in (XLA, LIBTPU)}
    for variable, added in missing.items():
        _check_known(added, variable)
    for variable, added in missing.items():
        if added:
            environ[variable] = " ".join([*added, *environ.get(variable, "").split()])
    return any(missing.values())


def flags_agreed(environ: Mapping[str, str]) -> dict[str, str]:
    """What XLA reads in this process, an entry for each flag: they must be the same in all processes of a run, but for
    the number of virtual devices and where programs are dumped.

    The names are those that a refusal has: of many flags it tells the ones that differ.
    """
    told = {
        f"XLA's flag {name_of(flag)} (of {variable} or run.xla_flags)": flag.partition("=")[2]
        for variable in (XLA, LIBTPU)
        for flag in environ.get(variable, "").split()
        if name_of(flag) not in _OF_HOST
    }
    return dict(sorted(told.items()))


def settings_agreed(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns JAX's settings, from its variables or ``jax.config``, that must be the same in all processes of a run.

    Ranks whose settings differ draw other initial values from the same key, or compile other programs for one
    collective. All settings count but those that are known to be harmless, so that new ones of JAX do too. If JAX is
    not loaded yet, they are the variables that it will read.
    """
    jax = sys.modules.get("jax")
    read = {name.lower(): value for name, value in environ.items() if name.startswith("JAX_")}
    return {
        f"JAX's setting {name} ({name.upper()})": value if isinstance(value, bool | float | None) else str(value)
        for name, value in sorted((read if jax is None else jax.config.values).items())
        if not _OF_A_PROCESS.search(name)
    }


def _missing(flags: Sequence[str], variable: str, environ: Mapping[str, str]) -> list[str]:
    own = [flag for flag in flags if (LIBTPU if flag.startswith(_OF_TPUS) else XLA) == variable]
    told = [name_of(flag) for flag in environ.get(variable, "").split()]
    return [flag for flag in own if name_of(flag) not in told]


def _check_known(flags: Iterable[str], variable: str) -> None:
    names = {flag: name_of(flag).removeprefix("--").encode() for flag in flags}
    for library in _libraries(variable) if names else ():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            unknown = [flag for flag, name in names.items() if content.find(name + b"\0") < 0]
        if unknown:
            raise ValueError(
                f"xla_flags has {unknown[0]}, which {library.name} of this installation does not know, and XLA would "
                "end the process: take it out, or install the version that knows it"
            )


def _libraries(variable: str) -> Iterator[Path]:
    """Those that are installed."""
    for package, pattern in _LIBRARIES[variable]:
        spec = importlib.util.find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            yield from sorted(Path(folder).glob(pattern))
