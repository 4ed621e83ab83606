"""The schedules that are known by a name, as descriptions; each is registered as its module is imported."""

from rrfp_jax.schedules.published import looped as looped
from rrfp_jax.schedules.published import one_chunk as one_chunk
from rrfp_jax.schedules.published import waves as waves
from rrfp_jax.schedules.published import zb_auto as zb_auto
