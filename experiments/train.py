"""``python -m experiments.train``: the command ``rrfp train``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("train")
