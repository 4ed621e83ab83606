"""The learning rate of each update, from the optimizer's record.

With the peak ``P``, the final rate ``E``, ``W`` steps of warm-up and ``D`` of decay, update ``n``, counted from 0, has

===================  =====================================================================
warm-up, n < W       ``P * (n + 1) / (W + 1)``
constant             ``P``
linear               ``P + (E - P) * x``
cosine               ``E + (P - E) * (1 + cos(pi * x)) / 2``
warmup-stable-decay  ``P`` up to ``D`` updates before the last one, then ``P + (E - P) * x``
===================  =====================================================================

where ``x`` goes evenly from 0, at the beginning of the decay, to 1, ``D`` updates later, and stays there. Updates that
were skipped are not counted.
"""

import optax

from rrfp_jax.training.optimizer_config import CONSTANT, COSINE, STABLE, OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate of each update of a run of ``num_steps`` steps, as a function that may be traced.

    A decay without ``decay_steps`` has its final rate at the last step, and begins after the warm-up, or for
    warmup-stable-decay a tenth of the steps before. A warm-up that is as long as the run, or longer, is cut off, and
    nothing decays; a decay for which the run is too short takes what is left after the warm-up.
    """
    peak, warmup, last = config.learning_rate, config.warmup_steps, max(num_steps - 1, config.warmup_steps + 1)
    first = peak / (warmup + 1)
    rise = optax.linear_schedule(first, peak, warmup)
    if config.schedule == CONSTANT:
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    assert config.final_learning_rate is not None
    if config.schedule == STABLE:
        length = -(-num_steps // 10) if config.decay_steps is None else config.decay_steps
        begin = max(warmup, last - length)
        length = last - begin
    else:
        begin, length = warmup, last - warmup if config.decay_steps is None else config.decay_steps
    if config.schedule == COSINE:
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, warmup + length, config.final_learning_rate)
    fall = optax.linear_schedule(peak, config.final_learning_rate, length, begin - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def rates_changed(config: OptimizerConfig, before: int, now: int, step: int, update: int) -> str:
    """Returns in words how the learning rates of a run change if it had ``before`` steps in all, now has ``now`` of
    them, and goes on at ``step`` with its update number ``update``."""
    if config.schedule == CONSTANT or (config.decay_steps is not None and config.schedule != STABLE):
        return "its learning rates stay as they are"
    was, becomes = (float(learning_rate_schedule(config, num_steps)(update)) for num_steps in (before, now))
    last = float(learning_rate_schedule(config, now)(max(update, update + now - 1 - step)))
    return (
        f"its learning rates change, to {becomes:.2e} at step {step}, which was to have {was:.2e}, and {last:.2e} at "
        "the last"
    )
