"""Data sets whose position is the step number, and the thread that reads one step ahead."""

from rrfp_jax.data.dataset import Batch, Dataset, prefetched
from rrfp_jax.data.text_bytes import VOCAB_SIZE, DataConfig, TextBytes

__all__ = ["VOCAB_SIZE", "Batch", "DataConfig", "Dataset", "TextBytes", "prefetched"]
