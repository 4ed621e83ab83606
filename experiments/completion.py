"""``python -m experiments.completion``: the command ``rrfp completion``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("completion")
