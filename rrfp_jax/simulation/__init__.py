"""Virtual time: the arbiters of the runtime driven by modelled durations, links and jitter, with bounds beside."""

from rrfp_jax.simulation.bounds import LowerBound, at_least_ms, bf_upper_bound_ms, lower_bound
from rrfp_jax.simulation.costs import Costs, check_durations, constant, for_graph, for_steps, recorded
from rrfp_jax.simulation.driver import EventLog, Machine, Simulation, simulate
from rrfp_jax.simulation.jitter import PAPER_LEVELS, InjectedSleeps, SleepLevel, bimodal, lognormal, paper, straggler
from rrfp_jax.simulation.links import Communication, Links, both_directions
from rrfp_jax.simulation.optimum import Optimum, find_optimum
from rrfp_jax.simulation.result import MemoryWeights, RunMetrics, peak_memory, run_metrics

__all__ = [
    "PAPER_LEVELS",
    "Communication",
    "Costs",
    "EventLog",
    "InjectedSleeps",
    "Links",
    "LowerBound",
    "Machine",
    "MemoryWeights",
    "Optimum",
    "RunMetrics",
    "Simulation",
    "SleepLevel",
    "at_least_ms",
    "bf_upper_bound_ms",
    "bimodal",
    "both_directions",
    "check_durations",
    "constant",
    "find_optimum",
    "for_graph",
    "for_steps",
    "lognormal",
    "lower_bound",
    "paper",
    "peak_memory",
    "recorded",
    "run_metrics",
    "simulate",
    "straggler",
]
