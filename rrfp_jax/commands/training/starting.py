"""The start of a run from the parameters of an import or of another run, in place of initial values."""

from pathlib import Path

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_tokens import INIT_FROM
from rrfp_jax.hf.model_folder import ModelSections, open_model
from rrfp_jax.models.vision_config import ProjectorConfig


def check_init_from(config: TrainConfig) -> None:
    """Raise ValueError, in one sentence, where ``run.init_from`` is no such folder, or that of another model.

    Its parameters are not looked at yet.
    """
    if config.run.init_from is not None:
        open_model(Path(config.run.init_from), INIT_FROM).check_fits(sections_of(config), INIT_FROM)


def sections_of(config: TrainConfig) -> ModelSections:
    """Returns the sections of a configuration that describe its model, with the default projector beside an encoder."""
    projector = config.projector or (None if config.vision is None else ProjectorConfig())
    return ModelSections(model=config.model, vision=config.vision, projector=projector)
