"""``python -m experiments.import_hf``: the command ``rrfp import-hf``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("import-hf")
