"""A deterministic run refuses to start where the machine's own sums are not reproducible."""

import jax
import pytest

from rrfp_jax.runtime.jax_environment import require_determinism


def test_pinned_thread_pools_are_accepted() -> None:
    require_determinism(jax.local_devices())


@pytest.mark.parametrize(("value", "message"), [(None, "NPROC=8"), ("4", "at least 8"), ("many", "NPROC=8")])
def test_unpinned_thread_pools_are_refused(monkeypatch: pytest.MonkeyPatch, value: str | None, message: str) -> None:
    monkeypatch.delenv("NPROC")
    if value is not None:
        monkeypatch.setenv("NPROC", value)
    with pytest.raises(ValueError, match=message):
        require_determinism(jax.local_devices())


class Gpu:
    platform = "gpu"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_gpu_deterministic_ops=false",
        "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false",
        "--xla_gpu_exclude_nondeterministic_ops=true",  # kernels are still chosen by time
        "--xla_gpu_exclude_nondeterministic_ops --xla_gpu_autotune_level=4",
        "--xla_gpu_autotune_level=0",
    ],
)
def test_gpu_kernels_that_may_differ_are_refused(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ValueError, match="add --xla_gpu_deterministic_ops=true to XLA_FLAGS"):
        require_determinism([Gpu()])


@pytest.mark.parametrize(
    "flags",
    [
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_deterministic_ops",
        "--xla_gpu_exclude_nondeterministic_ops=1 --xla_gpu_autotune_level=0",
    ],
)
def test_gpu_kernels_that_are_always_the_same_are_accepted(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    require_determinism([Gpu()])
