"""Data sets whose position is the step number, and the threads that make batches ahead."""

from rrfp_jax.data.config import ImageTextConfig as ImageTextConfig
from rrfp_jax.data.config import OwnDataConfig as OwnDataConfig
from rrfp_jax.data.config import TextConfig as TextConfig
from rrfp_jax.data.config import TokensConfig as TokensConfig
from rrfp_jax.data.dataset import Batch as Batch
from rrfp_jax.data.dataset import BatchContents as BatchContents
from rrfp_jax.data.dataset import BrokenData as BrokenData
from rrfp_jax.data.dataset import BucketSpecs as BucketSpecs
from rrfp_jax.data.dataset import Dataset as Dataset
from rrfp_jax.data.dataset import Reads as Reads
from rrfp_jax.data.dataset import contents_of as contents_of
from rrfp_jax.data.dataset import prefetched as prefetched
from rrfp_jax.data.image_text import ImageText as ImageText
from rrfp_jax.data.own_data import OwnData as OwnData
from rrfp_jax.data.sample_order import HELD_OUT as HELD_OUT
from rrfp_jax.data.sample_order import TRAIN as TRAIN
from rrfp_jax.data.sample_order import Part as Part
from rrfp_jax.data.text_bytes import VOCAB_SIZE as VOCAB_SIZE
from rrfp_jax.data.text_bytes import TextBytes as TextBytes
from rrfp_jax.data.token_data import Tokens as Tokens
