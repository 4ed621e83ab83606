"""What the layers of a model cost, in milliseconds and bytes, and what a cut of them into chunks costs then."""

from rrfp_jax.planning.costs.cost_book import CostBook as CostBook
from rrfp_jax.planning.costs.cost_book import CostEntry as CostEntry
from rrfp_jax.planning.costs.cut_model import CutModel as CutModel
from rrfp_jax.planning.costs.layer_costs import LayerCosts as LayerCosts
from rrfp_jax.planning.costs.layer_costs import LinkCosts as LinkCosts
from rrfp_jax.planning.costs.layer_costs import ModelCosts as ModelCosts
from rrfp_jax.planning.costs.noise import Noise as Noise
