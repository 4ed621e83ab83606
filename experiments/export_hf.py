"""``python -m experiments.export_hf``: the command ``rrfp export-hf``, from the checkout."""

from rrfp_jax.commands.main import run

if __name__ == "__main__":
    run("export-hf")
