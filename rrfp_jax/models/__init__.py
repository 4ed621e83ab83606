"""Flax models cut into chunks. The models know nothing of pipelines, stages or schedules.

The model itself loads on first use, so that its configuration can be checked before JAX is loaded.
"""

from typing import TYPE_CHECKING, Any

from rrfp_jax.models.config import LanguageModelConfig

if TYPE_CHECKING:
    from rrfp_jax.models.model import LanguageModel, language_model

__all__ = ["LanguageModel", "LanguageModelConfig", "language_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rrfp_jax.models' has no attribute {name!r}")
    from rrfp_jax.models import model

    return getattr(model, name)
