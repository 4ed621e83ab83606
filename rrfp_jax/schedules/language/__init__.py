"""The language of schedules: a description is a pure function of a stage to an order (docs/schedules.md)."""

from rrfp_jax.schedules.language.blocks import block as block
from rrfp_jax.schedules.language.blocks import slots as slots
from rrfp_jax.schedules.language.orders import B as B
from rrfp_jax.schedules.language.orders import F as F
from rrfp_jax.schedules.language.orders import I as I
from rrfp_jax.schedules.language.orders import TaskOrder as TaskOrder
from rrfp_jax.schedules.language.orders import W as W
from rrfp_jax.schedules.language.orders import given as given
from rrfp_jax.schedules.language.orders import nothing as nothing
from rrfp_jax.schedules.language.orders import owed as owed
from rrfp_jax.schedules.language.orders import pair as pair
from rrfp_jax.schedules.language.orders import rounds as rounds
from rrfp_jax.schedules.language.orders import stream as stream
from rrfp_jax.schedules.language.rule import Rule as Rule
from rrfp_jax.schedules.language.rule import like as like
from rrfp_jax.schedules.language.rule import rule as rule
from rrfp_jax.schedules.language.rule import turns as turns
from rrfp_jax.schedules.language.stage import Described as Described
from rrfp_jax.schedules.language.stage import Stage as Stage
from rrfp_jax.schedules.language.stage import quickest as quickest
