"""An update whose optimizer state lies in host memory, as the compilers of accelerators see it."""

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import Device
from rrfp_jax.planner.compile_for import CompiledRun, compile_run


def compiled(target: Device, *, moved: bool) -> CompiledRun:
    sizes = {"num_layers": 4, "hidden": 512, "num_heads": 4, "mlp_dim": 2048}
    run = {f"model.{name}": size for name, size in sizes.items()} | {"pipeline.num_stages": 2}
    config = load_train_config("cpu/debug", run | {"run.platform": None, "optimizer.on_host": moved})
    return compile_run(config, target.name, TrainingConsole(0, is_quiet=True))


def test_the_state_lies_on_the_host_and_an_update_moves_one_layer_at_a_time(target: Device) -> None:
    plain, moved = (compiled(target, moved=is_moved) for is_moved in (False, True))
    for with_state, without in zip(plain.compiled.forecast, moved.compiled.forecast, strict=True):
        assert without.host_peak > 0
        assert with_state.fixed - without.fixed == pytest.approx(without.host_peak, rel=1e-3)
        assert without.peak < with_state.peak
    for chunk, programs in moved.compiled.programs.chunks.items():
        updates = {name: each for name, each in programs.compiled.items() if name.startswith("update ")}
        assert len(updates) == len(programs.updates.parts) >= 2, chunk
        on_host = 0
        for program in updates.values():
            memory = program.memory_analysis()
            assert memory.host_argument_size_in_bytes == memory.host_output_size_in_bytes > 0
            on_host += memory.host_argument_size_in_bytes
            # No more than its state on its way in and out, and a constant of the compiler.
            assert memory.temp_size_in_bytes <= 2.1 * memory.host_argument_size_in_bytes + (1 << 20)
        assert on_host == pytest.approx(programs.sizes.optimizer_host_bytes, rel=1e-3)
