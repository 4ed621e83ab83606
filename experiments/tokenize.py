"""``python -m experiments.tokenize``: the command ``rrfp tokenize``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("tokenize")
