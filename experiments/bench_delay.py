"""Loss that a delay of one update costs, by optimizer: a byte-level model of four layers in a plain loop on one core.

    python -m experiments.bench_delay --steps 2000 --seeds 3

``pipeline.delay: 1`` trains as this loop does, as the tests show; the loop is faster at this size. A row is one
optimizer at one learning rate: synchronous, delayed, or delayed with ``feedback``. Its losses are the means over the
last tenth of the steps, one for each seed, over batches that are the same for all rows.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

# One thread: a model of this size gains nothing by more. Set before JAX is loaded.
os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}"

import jax
import numpy as np
import optax

from rrfp_jax.data.config import TextConfig
from rrfp_jax.data.text_bytes import TextBytes
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import Loss
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_config import ADAMW, MUON, OptimizerConfig

RATES = {ADAMW: (3e-3, 6e-3, 1e-2), MUON: (6e-3, 1.2e-2, 2.5e-2)}
"""Learning rates that are tried: the same ones with a delay and without."""
WAYS = {"synchronous": (0, False), "delay 1": (1, False), "delay 1, feedback": (1, True)}
"""Delay and feedback of each way to train."""
MODEL = LanguageModelConfig(vocab_size=256, hidden=64, num_layers=4, num_heads=4, mlp_dim=256, init_std=0.05)
LENGTH, ROWS = 64, 8
CLIP_NORM = 1.0


def losses_of(config: OptimizerConfig, delay: int, steps: int, seed: int) -> Iterator[jax.Array]:
    """Trains the model with gradients taken before the last ``delay`` updates, and yields every step's loss."""
    (chunk,) = language_model(MODEL).split(1)
    schedule = learning_rate_schedule(config, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), make_optimizer(config, schedule))

    def mean_loss(params: Any, microbatch: Any) -> jax.Array:
        loss = Loss(*chunk.apply(params, None, microbatch, key=None))
        return loss.loss_sum / loss.weight

    @jax.jit
    def step(params: Any, older: Any, state: Any, microbatch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(older, microbatch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    data = TextBytes(TextConfig(length=LENGTH, batch_size=ROWS, num_microbatches=1, seed=seed))
    params = older = jax.jit(chunk.init)(jax.random.key(seed))
    state = optimizer.init(params)
    for number in range(steps):
        microbatch = {name: leaf[0] for name, leaf in data.batch(number).items()}
        updated, state, loss = step(params, older if delay else params, state, microbatch)
        params, older = updated, params
        yield loss


def main() -> None:
    """Prints a row for each optimizer, learning rate and way to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| optimizer | rate | way | loss | by seed |\n|---|---|---|---|---|")
    for name, rates in RATES.items():
        for rate in rates:
            for way, (delay, feedback) in WAYS.items():
                config = OptimizerConfig(
                    name=name,
                    learning_rate=rate,
                    final_learning_rate=rate / 10,
                    warmup_steps=arguments.steps // 20,
                    arguments={"feedback": feedback},
                )
                ends = []
                for seed in range(arguments.seeds):
                    losses = [*losses_of(config, delay, arguments.steps, seed)][-(arguments.steps // 10) :]
                    ends.append(float(np.mean(losses)))
                by_seed = ", ".join(f"{end:.3f}" for end in ends)
                print(f"| {name} | {rate:g} | {way} | {np.mean(ends):.3f} | {by_seed} |", flush=True)


if __name__ == "__main__":
    main()
