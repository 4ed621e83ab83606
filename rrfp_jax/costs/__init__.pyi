"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.costs.cut_model import CutModel as CutModel
from rrfp_jax.costs.layer_costs import CostBook as CostBook
from rrfp_jax.costs.layer_costs import CostEntry as CostEntry
from rrfp_jax.costs.layer_costs import DeviceCosts as DeviceCosts
from rrfp_jax.costs.layer_costs import LayerCosts as LayerCosts
from rrfp_jax.costs.layer_costs import LinkCosts as LinkCosts
from rrfp_jax.costs.layer_costs import MachineCosts as MachineCosts
from rrfp_jax.costs.layer_costs import ModelCosts as ModelCosts
from rrfp_jax.costs.layer_costs import Noise as Noise
