"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.models.adapters import add_adapters as add_adapters
from rrfp_jax.models.config import AdaptersConfig as AdaptersConfig
from rrfp_jax.models.config import ExpertsConfig as ExpertsConfig
from rrfp_jax.models.config import Float8Config as Float8Config
from rrfp_jax.models.config import LanguageModelConfig as LanguageModelConfig
from rrfp_jax.models.config import RopeScaling as RopeScaling
from rrfp_jax.models.encoder import PixelScale as PixelScale
from rrfp_jax.models.flax_modules import chunk_from_linen as chunk_from_linen
from rrfp_jax.models.flax_modules import chunk_from_nnx as chunk_from_nnx
from rrfp_jax.models.flax_modules import split_nnx as split_nnx
from rrfp_jax.models.model import ChunkGraph as ChunkGraph
from rrfp_jax.models.model import LanguageModel as LanguageModel
from rrfp_jax.models.model import language_model as language_model
from rrfp_jax.models.vision_config import AudioConfig as AudioConfig
from rrfp_jax.models.vision_config import ProjectorConfig as ProjectorConfig
from rrfp_jax.models.vision_config import VisionConfig as VisionConfig
from rrfp_jax.models.vision_config import VisionLanguageConfig as VisionLanguageConfig
from rrfp_jax.models.vision_config import check_image_index as check_image_index
from rrfp_jax.models.vision_language import VisionLanguageModel as VisionLanguageModel
from rrfp_jax.models.vision_language import vision_language_model as vision_language_model
