"""``python -m experiments.schedule``: the command ``rrfp schedule``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("schedule")
