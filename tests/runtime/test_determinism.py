"""A deterministic run refuses to start where the machine's own sums are not reproducible."""

import jax
import pytest

from rrfp_jax.runtime.determinism import require_determinism


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


def test_gpu_kernels_must_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ValueError, match="xla_gpu_deterministic_ops=true"):
        require_determinism([Gpu()])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    require_determinism([Gpu()])
