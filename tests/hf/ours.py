"""What our model computes from the parameters of an imported folder, without a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.hf.model_folder import open_model
from rrfp_jax.models import add_adapters
from rrfp_jax.models.cuts import plan_cut
from rrfp_jax.models.model import decoder_chunk
from rrfp_jax.models.vision_config import VisionLanguageConfig
from rrfp_jax.models.vision_language import vision_language_model


class Ours:
    """The model of an imported folder, or of a run's."""

    def __init__(self, folder: Path) -> None:
        held = open_model(folder, "the folder")
        self.sections = held.sections
        self.params: dict[str, Any] = read_params(newest_step(held.checkpoints))

    def logits(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """``[batch, length, vocab_size]``."""
        return np.asarray(jax.jit(self._logits)(self.params, leaves))

    def gradients(self, leaves: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Of the mean loss of all tokens but the first, by layer."""
        loss, grads = jax.jit(jax.value_and_grad(self._loss))(self.params, leaves)
        return float(loss), grads

    def _loss(self, params: Any, leaves: Mapping[str, Any]) -> jax.Array:
        logits = self._logits(params, leaves)[:, :-1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, leaves["tokens"][:, 1:]))

    def _logits(self, params: Any, leaves: Mapping[str, Any]) -> jax.Array:
        config, features = self.sections.model, None
        if self.sections.vision is None:
            plan = plan_cut(config.num_layers, num_chunks=1)[0]
            chunks = [decoder_chunk(config, plan, gives_logits=True)]
        else:
            assert self.sections.projector is not None
            whole = VisionLanguageConfig(vision=self.sections.vision, projector=self.sections.projector, decoder=config)
            chunks = vision_language_model(whole).split(gives_logits=True).chunks
        if self.sections.adapters is not None:
            chunks = add_adapters(chunks, self.sections.adapters)
        for chunk in chunks:
            own = {name: leaves[name] for name in chunk.leaves if name in leaves}
            features = chunk.apply(params, features, own, key=None)
        return features
