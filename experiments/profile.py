"""``python -m experiments.profile``: the command ``rrfp profile``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("profile")
