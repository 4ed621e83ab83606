"""``rrfp launch`` that prepares spare processes at once."""

from rrfp_jax.cluster import launcher
from rrfp_jax.commands.main import run

if __name__ == "__main__":
    launcher._SPARES_S = 0.0
    run("launch")
