"""``python -m experiments.simulate``: the command ``rrfp simulate``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("simulate")
