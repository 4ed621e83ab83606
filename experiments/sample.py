"""``python -m experiments.sample``: the command ``rrfp sample``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("sample")
