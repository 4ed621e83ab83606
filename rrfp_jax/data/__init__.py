"""Data sets whose position is the step number, and the threads that make batches ahead."""

from rrfp_jax.data.contents import BatchContents as BatchContents
from rrfp_jax.data.contents import contents_of as contents_of
from rrfp_jax.data.dataset import Batch as Batch
from rrfp_jax.data.dataset import BrokenData as BrokenData
from rrfp_jax.data.dataset import Bucket as Bucket
from rrfp_jax.data.dataset import Dataset as Dataset
from rrfp_jax.data.dataset import Reads as Reads
from rrfp_jax.data.dataset import prefetched as prefetched
from rrfp_jax.data.image_text import ImageText as ImageText
from rrfp_jax.data.image_text_config import ImageTextConfig as ImageTextConfig
from rrfp_jax.data.rendered_config import RenderedTextConfig as RenderedTextConfig
from rrfp_jax.data.rendered_text import HeldOut as HeldOut
from rrfp_jax.data.rendered_text import RenderedText as RenderedText
from rrfp_jax.data.text_bytes import VOCAB_SIZE as VOCAB_SIZE
from rrfp_jax.data.text_bytes import DataConfig as DataConfig
from rrfp_jax.data.text_bytes import TextBytes as TextBytes
