"""Token sets: the tokens of many documents in files, read where they are needed; see ``header.py`` for the format."""

from rrfp_jax.data.tokens.header import TokenizerName as TokenizerName
from rrfp_jax.data.tokens.header import TokenSetHeader as TokenSetHeader
from rrfp_jax.data.tokens.token_set import TokenSet as TokenSet
from rrfp_jax.data.tokens.writer import TokenSetWriter as TokenSetWriter
from rrfp_jax.data.tokens.writer import write_token_set as write_token_set
