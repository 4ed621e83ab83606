"""Every private name of JAX does what we rely on."""

import inspect
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.compilation_cache_interface import CacheInterface

from rrfp_jax.private import jax_names
from rrfp_jax.private.jax_names import JAX_NAMES
from rrfp_jax.programs.target import Target, tracing_for
from tests.private.canaries import assert_kept, assert_takes

# As they were before the session replaced them.
OF_CACHE = dict(vars(jax_names.compilation_cache))
CACHE_WRITE = jax_names.compiler._cache_write


def global_state() -> None:
    state = jax_names.global_state
    assert (state.client, state.process_id, state.num_processes, state.coordinator_address) == (None, 0, 1, None)
    assert not jax.distributed.is_initialized()
    state.client = object()
    try:
        assert jax.distributed.is_initialized(), "JAX looks for its client elsewhere"
    finally:
        state.client = None


def backends_are_initialized() -> None:
    jax.devices()
    assert jax_names.backends_are_initialized() is True


def make_cpu_client() -> None:
    assert len(jax_names.make_cpu_client(collectives=None).devices()) == len(jax.devices("cpu"))


def register_backend_factory() -> None:
    assert_takes(jax_names.register_backend_factory, "cpu", lambda: None, priority=0, fail_quietly=False)


def cluster_env() -> None:
    kinds = jax_names.ClusterEnv._cluster_types
    assert {"slurm", "ompi"} <= {kind.name for kind in kinds}
    assert any("K8s" in kind.__name__ for kind in kinds)
    for kind in kinds:
        assert isinstance(kind.opt_in_only_method, bool)
        for question in (kind.is_env_present, kind.get_process_id, kind.get_process_count):
            assert_takes(question)


def compilation_cache() -> None:
    assert_takes(OF_CACHE["get_file_cache"], "/path")
    assert_takes(OF_CACHE["get_cache_key"], "module", np.array(jax.devices()), "options", "backend")
    assert_takes(OF_CACHE["put_executable_and_time"], "key", "name", "executable", "backend", 1)
    assert_takes(OF_CACHE["reset_cache"])
    assert set(CacheInterface.__abstractmethods__) == {"get", "put"}


def fused_attention_stablehlo() -> None:
    fused = jax_names.fused_attention_stablehlo
    for question in (fused.check_compute_capability, fused.is_cuda_compute_capability_equal):
        assert_takes(question, "9.0")
    source = inspect.getsource(fused)
    assert source.count("check_compute_capability(") > 1, "JAX asks for the capability by another function"
    with tracing_for(Target(platform="gpu", kind="NVIDIA H100", is_nvidia=True, capability=(9, 0))):
        assert fused.check_compute_capability("8.0")
        assert not fused.check_compute_capability("10.0")
        assert fused.is_cuda_compute_capability_equal("9.0")
    assert not fused.check_compute_capability("8.0")


def compiler() -> None:
    first = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
    assert list(inspect.signature(CACHE_WRITE).parameters)[:5] == first
    source = Path(inspect.getfile(jax_names.compiler)).read_text(encoding="utf-8")
    assert "  _cache_write(" in source, "it is not called by its name in the module, where we replace it"
    assert "compilation_cache.get_cache_key(" in source


def trace_state_clean() -> None:
    seen = []
    jax.jit(lambda: seen.append(jax_names.trace_state_clean()))()
    jax.grad(lambda x: seen.append(jax_names.trace_state_clean()) or x)(1.0)
    assert (seen, jax_names.trace_state_clean()) == ([False, False], True)


CHECKS = {
    "global_state": global_state,
    "backends_are_initialized": backends_are_initialized,
    "make_cpu_client": make_cpu_client,
    "register_backend_factory": register_backend_factory,
    "ClusterEnv": cluster_env,
    "compilation_cache": compilation_cache,
    "compiler": compiler,
    "trace_state_clean": trace_state_clean,
    "fused_attention_stablehlo": fused_attention_stablehlo,
}


@pytest.mark.parametrize("name", JAX_NAMES)
def test_it_is_as_we_use_it(name: str):
    assert_kept("jax", JAX_NAMES, CHECKS, name)
