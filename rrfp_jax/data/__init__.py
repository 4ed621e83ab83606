"""Data sets whose position is the step number, and the thread that reads one step ahead."""

from rrfp_jax.data.dataset import Batch as Batch
from rrfp_jax.data.dataset import Dataset as Dataset
from rrfp_jax.data.dataset import prefetched as prefetched
from rrfp_jax.data.text_bytes import VOCAB_SIZE as VOCAB_SIZE
from rrfp_jax.data.text_bytes import DataConfig as DataConfig
from rrfp_jax.data.text_bytes import TextBytes as TextBytes
