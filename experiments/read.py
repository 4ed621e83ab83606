"""``python -m experiments.read``: the command ``rrfp read``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("read")
