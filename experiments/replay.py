"""``python -m experiments.replay``: the command ``rrfp replay``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("replay")
