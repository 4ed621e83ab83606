"""The search for an order of one cut in given memory."""

from rrfp_jax.planning.orders.activations import activation_weight as activation_weight
from rrfp_jax.planning.orders.activations import activation_weights as activation_weights
from rrfp_jax.planning.orders.activations import room_for_activations as room_for_activations
from rrfp_jax.planning.orders.found import FoundOrder as FoundOrder
from rrfp_jax.planning.orders.search import named_orders as named_orders
from rrfp_jax.planning.orders.search import search_orders as search_orders
