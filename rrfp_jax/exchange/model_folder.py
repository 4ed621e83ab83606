"""The folder that an import writes, and how parameters are found in it, or in a run's folder.

::

    model.yaml           the sections of a configuration that describe the model
    checkpoints/         its parameters, as a run's checkpoint after 0 steps
    hugging-face/        config.json, tokenizer and so on as they came; tensors that our models do not use
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rrfp_jax.exchange.model_sections import ModelSections, differences
from rrfp_jax.record_files import TEXT_BYTES, read_record
from rrfp_jax.yaml_text import read_yaml

MODEL, CHECKPOINTS, CARRIED = "model.yaml", "checkpoints", "hugging-face"
UNUSED = "unused.safetensors"
"""The tensors that are carried along."""
RUN = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """An imported model, or a run."""

    path: Path
    sections: ModelSections
    """What the model is."""
    config: dict[str, Any]
    """The whole configuration of a run; of an import the sections."""

    @property
    def is_import(self) -> bool:
        """Whether it was imported, and not trained here."""
        return (self.path / MODEL).is_file()

    @property
    def checkpoints(self) -> Path:
        """Where the parameters are."""
        return self.path / CHECKPOINTS

    def check_fits(self, given: ModelSections, what: str) -> None:
        """Raise ValueError where parameters of this folder are those of another model; ``what`` is the key to mend."""
        found = differences(self.sections, given)
        if found:
            raise ValueError(
                f"{what} {self.path} holds another model: {'; '.join(found)}: take the model from its "
                f"{MODEL if self.is_import else RUN}, or name another folder"
            )

    def origin(self) -> "ModelFolder | None":
        """The import that the parameters began with, through all runs between; None where they began at random.

        Raises ValueError where a folder on the way is gone.
        """
        folder, seen = self, {self.path.resolve()}
        while not folder.is_import:
            began = (folder.config.get("run") or {}).get("init_from")
            if began is None:
                return None
            folder = open_model(Path(began), f"{folder.path} began with init_from")
            if folder.path.resolve() in seen:
                raise ValueError(f"{folder.path} began with itself, by its init_from: give the import in its place")
            seen.add(folder.path.resolve())
        return folder


def open_model(path: Path, what: str) -> ModelFolder:
    """The folder of an import or a run, its parameters not looked at yet.

    ``what`` names it in the sentence of the ValueError that is raised where it is neither.
    """
    file = next((path / name for name in (MODEL, RUN) if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{what} {path} has neither {MODEL} nor {RUN}: give the folder of an import, or of a run")
    try:
        config = read_yaml(read_record(file, TEXT_BYTES)[0].decode())
    except (OSError, ValueError, yaml.YAMLError) as error:  # no UTF-8, and dates that do not exist, are of the second
        reason = getattr(error, "strerror", None) or "no YAML"
        raise ValueError(f"{what} {file} cannot be read ({reason}): import or train again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{what} {file} holds no sections: import or train again")
    return ModelFolder(path=path, sections=ModelSections.of(config, str(file)), config=config)
