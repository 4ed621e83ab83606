"""``python -m experiments.levels``: the command ``rrfp levels``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("levels")
