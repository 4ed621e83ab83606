"""The configurations that come with the package: in a wheel as its files, in the checkout as ``tpu_gpu_configs/``."""

import difflib
import re
from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files("rrfp_jax"))) / "presets"


def preset_names() -> list[str]:
    """Returns the names of all presets, as ``cpu/debug``."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("[ctg]pu/*.yaml"))


def find_config(name: str) -> str:
    """The path of a configuration: a file, or a preset by its name.

    Raises ValueError where there is neither.
    """
    if Path(name).exists() or not _may_be_preset(name):
        return name
    return str(_preset(name, f"configuration {name} is neither a file nor a preset"))


def find_preset(name: str) -> Path:
    """The file of a preset, by its name. Raises ValueError where there is none."""
    return _preset(name.removesuffix(".yaml"), f"{name!r} is no preset")


def summary_of(name: str) -> str:
    """Returns the summary of a preset: the first sentence of the comment that its file begins with."""
    lines = find_preset(name).read_text(encoding="utf-8").splitlines()
    head = "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return re.split(r"\. (?!\d)", " ".join(head.split("\n\n")[0].split()))[0].rstrip(".") + "."


def _preset(name: str, refusal: str) -> Path:
    if name in (known := preset_names()):
        return FOLDER / f"{name}.yaml"
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}" if near else f"the presets are {', '.join(known)}"
    raise ValueError(f"{refusal}: {advice}")


def _may_be_preset(name: str) -> bool:
    return Path(name).suffix not in (".yaml", ".yml") and not Path(name).is_absolute()
