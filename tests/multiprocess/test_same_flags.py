"""Processes whose environments give XLA or JAX differing settings are told so by name, before any of them compiles."""

from pathlib import Path

from rrfp_jax.exit_codes import DONE
from tests.multiprocess.launching import launched

PATIENCE_S = 120.0


def test_differing_flags_and_settings_are_refused_by_name(tmp_path: Path) -> None:
    arguments = ("--config", "cpu/debug", "--num-stages", 2, "--steps", 1, "--run-dir", tmp_path / "run")
    with launched("--processes", 2, "--", "flagged", *arguments) as launcher:
        assert launcher.wait(PATIENCE_S) != DONE, launcher.text
    sentence = (
        'XLA\'s flag --xla_cpu_enable_fast_math (of XLA_FLAGS or run.xla_flags) is nothing on rank 0, "true" on rank 1'
    )
    assert sentence in launcher.text, launcher.text
    setting = "JAX's setting jax_threefry_partitionable (JAX_THREEFRY_PARTITIONABLE)"
    assert f"{setting} is true on rank 0, false on rank 1" in launcher.text
    assert not (tmp_path / "run").exists()
