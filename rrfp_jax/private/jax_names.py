"""Private names of JAX, as in 0.10.2 to 0.12."""

from collections.abc import Callable
from typing import Any

from rrfp_jax.private import Private, naming

_CACHE = "a way to give jax.experimental.compilation_cache a cache of one's own, written by every process"

JAX_NAMES = {
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
    "fused_attention_stablehlo": Private(
        "the compute capability of a GPU that is not here, in place of the running backend's; and heads of queries and "
        "keys that are wider than those of values",
        "jax.nn.dot_product_attention asking the devices that it is lowered for, and taking such heads or segment ids",
    ),
}

with naming("jax", JAX_NAMES):
    from jax._src import compilation_cache, compiler
    from jax._src.clusters import ClusterEnv
    from jax._src.core import trace_state_clean
    from jax._src.cudnn import fused_attention_stablehlo
    from jax._src.distributed import global_state
    from jax._src.xla_bridge import backends_are_initialized, make_cpu_client, register_backend_factory

own_cache_key: Callable[..., str] = compilation_cache.get_cache_key


def replace_compile_cache(cache: Any, path: str, key: Callable[..., str], write: Callable[..., None]) -> None:
    """Replaces three functions of JAX's persistent compilation cache, which has no public way to do this.

    ``compilation_cache.get_file_cache``
        returns our directory in place of JAX's, which has no bound on its size.
    ``compilation_cache.get_cache_key``
        names the entry; ours calls :data:`own_cache_key`, leaves out the device and adds the host's CPU.
    ``compiler._cache_write``
        writes nothing on processes other than 0, since writers could collide on some file systems; ours can not, and
        each rank compiles programs of its own.
    """
    ours = {
        (compilation_cache, "get_file_cache"): lambda _: (cache, path),
        (compilation_cache, "get_cache_key"): key,
        (compiler, "_cache_write"): write,
    }
    for (module, name), function in ours.items():
        setattr(module, name, function)
    compilation_cache.reset_cache()


def answer_cudnn(capability: Callable[[], tuple[int, int] | None]) -> None:
    """Lets JAX's fused attention ask this function for the GPU's compute capability, and its own devices if that is
    None."""
    own_at_least: Callable[[str], bool] = fused_attention_stablehlo.check_compute_capability
    own_equal: Callable[[str], bool] = fused_attention_stablehlo.is_cuda_compute_capability_equal

    def at_least(wanted: str) -> bool:
        told = capability()
        return own_at_least(wanted) if told is None else told >= tuple(map(int, wanted.split(".")))

    def equal(wanted: str) -> bool:
        told = capability()
        return own_equal(wanted) if told is None else told == tuple(map(int, wanted.split(".")))

    fused_attention_stablehlo.check_compute_capability = at_least
    fused_attention_stablehlo.is_cuda_compute_capability_equal = equal


__all__ = [
    "JAX_NAMES",
    "ClusterEnv",
    "answer_cudnn",
    "backends_are_initialized",
    "compilation_cache",
    "compiler",
    "fused_attention_stablehlo",
    "global_state",
    "make_cpu_client",
    "own_cache_key",
    "register_backend_factory",
    "replace_compile_cache",
    "trace_state_clean",
]
