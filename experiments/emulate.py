"""``python -m experiments.emulate``: the command ``rrfp emulate``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("emulate")
