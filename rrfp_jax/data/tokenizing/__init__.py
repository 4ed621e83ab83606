"""From text, JSON lines and Parquet to a token set: cut into pieces, tokenised by several processes, the same bytes for
any number of them."""

from rrfp_jax.data.tokenizing.options import TokenizeOptions as TokenizeOptions
from rrfp_jax.data.tokenizing.processes import WorkerLost as WorkerLost
from rrfp_jax.data.tokenizing.tokenize import tokenize as tokenize
