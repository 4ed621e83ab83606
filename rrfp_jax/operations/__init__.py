"""Operations of a pipeline that come with the library, built with its language as a user's own would be."""

from rrfp_jax.operations.gather import gathered as gathered
from rrfp_jax.operations.gather import most_gathered as most_gathered
from rrfp_jax.operations.recompute import part_made as part_made
from rrfp_jax.operations.recompute import recompute as recompute
from rrfp_jax.operations.recompute import recomputed as recomputed
