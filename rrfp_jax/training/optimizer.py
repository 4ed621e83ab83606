"""The optimizer of a run, from its record: AdamW on a warm-up and cosine schedule, leaf by leaf."""

from typing import Any

import jax
import optax

from rrfp_jax.training.run_config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate of each update, counted from 0.

    Update 0 has ``peak / (warmup_steps + 1)``, update ``warmup_steps`` the peak, and update ``num_steps - 1`` the final
    rate. A warm-up that is as long as the run, or longer, is cut off, and nothing decays.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps - 1, config.warmup_steps + 1),
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW; the global norm is clipped by the pipeline, not here."""
    return optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=_is_matrix
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
