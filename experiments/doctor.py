"""``python -m experiments.doctor``: the command ``rrfp doctor``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("doctor")
