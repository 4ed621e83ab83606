"""The training command, whose processes start JAX together though none of their programs needs it."""

from rrfp_jax.commands.main import run
from rrfp_jax.layout import Layout

if __name__ == "__main__":
    Layout.needs_collectives = lambda self, **_: True  # type: ignore[method-assign]
    run("train")
