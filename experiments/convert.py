"""``python -m experiments.convert``: the command ``rrfp convert``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("convert")
