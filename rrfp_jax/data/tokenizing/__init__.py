"""Turns text, JSON lines and Parquet into a token set, with several processes; their number changes no byte of it.

``inputs.py`` holds the options and finds the files; ``_file_readers.py`` reads them; ``_text_parts.py`` makes documents
of them, in parts; ``_pieces.py`` cuts all files into pieces and keeps those that are done; ``_workers.py`` tokenises a
piece; ``_tokenize.py`` puts everything together.
"""

from rrfp_jax.data.tokenizing._tokenize import TokenizeProgress as TokenizeProgress
from rrfp_jax.data.tokenizing._tokenize import tokenize as tokenize
from rrfp_jax.data.tokenizing._tokenize import train_tokenizer_file as train_tokenizer_file
from rrfp_jax.data.tokenizing._workers import WorkerLost as WorkerLost
from rrfp_jax.data.tokenizing.inputs import TokenizeOptions as TokenizeOptions
