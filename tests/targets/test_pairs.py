"""Programs of two tasks: products run while tensor-parallel sums are under way, for which single programs wait."""

import re
from pathlib import Path

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import CUDA, Device
from rrfp_jax.planner.compile_for import CompiledRun, compile_run

CONFIG = """
model: {vocab_size: 256, hidden: %d, num_layers: %d, num_heads: 16, num_kv_heads: 8, mlp_dim: 8192,
  compute_dtype: bfloat16}
data: {kind: text, path: null, length: 2048, batch_size: 12, num_microbatches: 12}
pipeline: {num_stages: 3, mesh: {tensor: 4}, layout: %s, schedule: zb-h1, remat: dots,
  consume: foresight+pairs}
run: {steps: 10}
optimizer: {learning_rate: 3.0e-4}
"""
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*?\b(all-reduce(?:-start|-done)?)\((.*)")
_ON_TPU = re.compile(r"\s*%async-collective-(start|done)[.\d]* = ")
_PRODUCT = re.compile(r"\s*%?(gemm|dot_product|custom-call|cublas|wrapped_dot|fusion|convolution|loop_convolution)")


@pytest.fixture(scope="module")
def run(target: Device, tmp_path_factory: pytest.TempPathFactory) -> CompiledRun:
    path: Path = tmp_path_factory.mktemp("pairs") / "config.yaml"
    # A chunk has one layer where compiling takes minutes.
    sizes = (4096, 6, "Et*2|t*2|t*2L") if target.kind == CUDA else (2048, 3, "Et|t|tL")
    path.write_text(CONFIG % sizes)
    return compile_run(load_train_config(str(path), {}), target.name, TrainingConsole(0, is_quiet=True))


def products_within(text: str) -> list[int]:
    """Returns, for each all-reduce of a program's entry, how many kernels with products start before it is waited
    for."""
    lines, under_way, found = text.splitlines(), dict[str, int](), list[int]()
    for line in lines[next(number for number, line in enumerate(lines) if line.startswith("ENTRY")) :]:
        if (on_tpu := _ON_TPU.match(line)) is not None:  # fusions around the parts of a sum, one after the other
            if on_tpu[1] == "start":
                under_way["sum"] = 0
            else:
                found.append(under_way.pop("sum"))
        elif (match := _LINE.match(line)) is not None:
            name, opcode, rest = match.groups()
            if opcode.endswith("-start"):
                under_way[name] = 0
            elif opcode.endswith("-done"):
                (started,) = re.findall(r"%([\w.\-]+)", rest)[:1]
                found.append(under_way.pop(started))
            else:
                found.append(0)
        elif _PRODUCT.match(line) or "calls=%gemm" in line:
            under_way = {name: number + 1 for name, number in under_way.items()}
    return found


def test_sums_hide_behind_products_in_pairs_alone(run: CompiledRun) -> None:
    chunk, seen = run.compiled.programs.chunks[1], []
    for name in ("forward", "input_gradient"):
        alone = products_within(chunk.compiled[name].as_text() or "")
        assert len(alone) >= 2
        assert not any(alone)
    for title, program in chunk.compiled.items():
        if title.startswith("pair of "):
            together = products_within(program.as_text() or "")
            assert sum(number > 0 for number in together) >= len(together) / 2 > 0, title
            seen.append(title)
    assert len(seen) == 3


def test_a_pair_takes_over_the_arrays_that_its_programs_take_over(run: CompiledRun) -> None:
    for both, pair in run.compiled.programs.pairs.items():
        *alone, together = (each.memory_analysis().alias_size_in_bytes for each in (*both, pair.compiled))  # type: ignore[union-attr]
        assert together == sum(alone)
