"""``python -m experiments.plan``: the command ``rrfp plan``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("plan")
