"""Flax models cut into chunks. The models know nothing of pipelines, stages or schedules."""

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.language_model import LanguageModel, language_model

__all__ = ["LanguageModel", "LanguageModelConfig", "language_model"]
