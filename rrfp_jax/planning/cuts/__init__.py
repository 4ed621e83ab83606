"""Where a model is cut into chunks so that its fullest stage has least to do."""

from rrfp_jax.planning.cuts.best import best_cut as best_cut
from rrfp_jax.planning.cuts.even import even_cut as even_cut
from rrfp_jax.planning.cuts.room import Room as Room
