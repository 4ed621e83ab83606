"""``python -m experiments.config``: the command ``rrfp config``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("config")
