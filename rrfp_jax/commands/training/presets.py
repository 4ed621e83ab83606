"""The configurations that come with the package: in a wheel as its files, in the checkout as ``tpu_gpu_configs/``."""

import difflib
from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files("rrfp_jax"))) / "presets"


def preset_names() -> list[str]:
    """All of them, as ``cpu/debug``."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("[ctg]pu/*.yaml"))


def find_config(name: str) -> str:
    """The path of a configuration: a file, or a preset by its name.

    Raises ValueError where there is neither.
    """
    if Path(name).exists() or not _may_be_preset(name):
        return name
    if name in (known := preset_names()):
        return str(FOLDER / f"{name}.yaml")
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}" if near else f"the presets are {', '.join(known)}"
    raise ValueError(f"configuration {name} is neither a file nor a preset: {advice}")


def _may_be_preset(name: str) -> bool:
    return Path(name).suffix not in (".yaml", ".yml") and not Path(name).is_absolute()
