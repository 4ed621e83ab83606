"""Private names of Orbax, as in 0.12.8."""

from rrfp_jax.private.naming import Private, naming

NAMES = {
    "build_array_write_spec": Private(
        "where Orbax puts an array inside a checkpoint, for its merging of what several processes wrote",
        "the same in orbax.checkpoint.type_handlers, or a handler there for arrays of some processes only",
    ),
}

with naming("orbax-checkpoint", NAMES):
    from orbax.checkpoint._src.serialization.tensorstore_utils import build_array_write_spec

__all__ = ["NAMES", "build_array_write_spec"]
