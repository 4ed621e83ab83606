"""``python -m experiments.evaluate``: the command ``rrfp evaluate``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("evaluate")
