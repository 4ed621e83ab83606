"""``python -m experiments.launch``: the command ``rrfp launch``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("launch")
