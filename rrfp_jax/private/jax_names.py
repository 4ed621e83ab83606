"""Private names of JAX, as in 0.10.2 to 0.12."""

from collections.abc import Callable

from rrfp_jax.private.naming import Private, naming

_CACHE = "a way to give jax.experimental.compilation_cache a cache of one's own, written by every process"

NAMES = {
    "global_state": Private(
        "the client of the coordination service, which JAX looks for there",
        "a way to hand a connected client to jax.distributed",
    ),
    "backends_are_initialized": Private(
        "telling who asks for devices too early",
        "jax.distributed.initialize's own check, or a public name of it in jax.extend.backend",
    ),
    "make_cpu_client": Private(
        "CPU devices whose collectives listen on the interface of the run",
        "an option of JAX beside jax_cpu_collectives_implementation that names gloo's interface",
    ),
    "register_backend_factory": Private(
        "the same, in place of JAX's own CPU devices",
        "the same option, or jax.extend.backend",
    ),
    "ClusterEnv": Private(
        "the rank as SLURM, Kubernetes or Open MPI tell it to JAX",
        "a name in jax.distributed that detects without connecting",
    ),
    "compilation_cache": Private("a cache of compiled programs by our rules, in place of its functions", _CACHE),
    "compiler": Private("programs cached by all processes, in place of its _cache_write", _CACHE),
    "trace_state_clean": Private(
        "telling who steps a pipeline within a function that JAX traces",
        "a public name in jax.core that says whether a trace is under way",
    ),
    "CacheInterface": Private("the interface of such a cache", _CACHE),
    "fused_attention_stablehlo": Private(
        "the compute capability of a GPU that is not here, in place of the running backend's; and heads of queries and "
        "keys that are wider than those of values",
        "jax.nn.dot_product_attention asking the devices that it is lowered for, and taking such heads or segment ids",
    ),
}

with naming("jax", NAMES):
    from jax._src import compilation_cache, compiler
    from jax._src.clusters import ClusterEnv
    from jax._src.compilation_cache_interface import CacheInterface
    from jax._src.core import trace_state_clean
    from jax._src.cudnn import fused_attention_stablehlo
    from jax._src.distributed import global_state
    from jax._src.xla_bridge import backends_are_initialized, make_cpu_client, register_backend_factory


def answer_cudnn(capability: Callable[[], tuple[int, int] | None]) -> None:
    """Let JAX's fused attention ask this for the GPU's compute capability, and its own devices where that is None."""
    own_at_least: Callable[[str], bool] = fused_attention_stablehlo.check_compute_capability
    own_equal: Callable[[str], bool] = fused_attention_stablehlo.is_cuda_compute_capability_equal

    def at_least(wanted: str) -> bool:
        told = capability()
        return own_at_least(wanted) if told is None else told >= _numbers(wanted)

    def equal(wanted: str) -> bool:
        told = capability()
        return own_equal(wanted) if told is None else told == _numbers(wanted)

    fused_attention_stablehlo.check_compute_capability = at_least
    fused_attention_stablehlo.is_cuda_compute_capability_equal = equal


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


__all__ = [
    "NAMES",
    "CacheInterface",
    "ClusterEnv",
    "answer_cudnn",
    "backends_are_initialized",
    "compilation_cache",
    "compiler",
    "fused_attention_stablehlo",
    "global_state",
    "make_cpu_client",
    "register_backend_factory",
    "trace_state_clean",
]
