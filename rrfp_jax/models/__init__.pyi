"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.models.config import LanguageModelConfig as LanguageModelConfig
from rrfp_jax.models.model import LanguageModel as LanguageModel
from rrfp_jax.models.model import language_model as language_model
