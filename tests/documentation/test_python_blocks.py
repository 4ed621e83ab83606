"""Every Python example of the documentation runs, and does what the text around it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.running import run_code
from tests.documentation.blocks import ROOT, Block, blocks
from tests.environment import of_child

PYTHON = blocks("python")
SKETCHES = {
    "    buckets=[\n": "its names stand for a reader's own arrays; tests/test_pipeline_buckets.py runs the like"
}
"""Examples that are no whole programs, by what they hold, with the reason."""


def block_with(text: str) -> Block:
    """The one example that holds a text."""
    (found,) = (block for block in PYTHON if text in block.text)
    return found


TWO_CHUNKS = block_with("def lower(")
MODEL = TWO_CHUNKS.text.partition("with Pipeline")[0]
ENCODER = block_with("vision_language_model(config)").text

GIVEN = {
    "def plain_step": block_with("split_nnx(").text,
    "emulation = emulate(": """
import numpy as np
from rrfp_jax import Ordering, linear
from rrfp_jax.core import Agreement, StepRules
from rrfp_jax.schedules import chain
order = Ordering(hint="bf").resolve(linear(2), chain(2, 4))
arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL))
durations_ms = np.full((1, 2, 4, 3), 1.0)
""",
    "split = split_backward(": """
import jax, jax.numpy as jnp
fn = lambda params, inputs: jnp.tanh(inputs @ params)
params, inputs, output_grad = jnp.eye(3), jnp.ones((2, 3)), jnp.ones((2, 3))
""",
    "chunks = freeze(": f"{ENCODER}\nchunks = graph.chunks",
    "cluster = join(": f"""{MODEL.partition("x = jax")[0]}
import numpy as np
from types import SimpleNamespace
x = np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)
batch = {{"x": x, "y": np.sin(x).sum(axis=-1)}}
optimizer, batches = optax.adam(0.01), SimpleNamespace(batch=lambda step: batch)
""",
}
"""What examples take for granted."""

AFTER = {
    "emulation = emulate(": "assert len(idle_shares(emulation.on_device)) == 2",
    "split = split_backward(": """
_, vjp = jax.vjp(fn, params, inputs)
assert jax.tree.all(jax.tree.map(jnp.allclose, (params_grad, input_grad), vjp(output_grad)))
""",
}
"""What is to hold behind them."""


def program(block: Block) -> str:
    """The example between what it takes for granted and what is to hold."""
    before, after = ([code for text, code in texts.items() if text in block.text] for texts in (GIVEN, AFTER))
    return "\n".join([*before, block.text, *after])


def is_sketch(block: Block) -> bool:
    return any(text in block.text for text in SKETCHES)


def is_long(block: Block) -> bool:
    """The library's model and Flax's compile for a while; processes are launched."""
    return any(text in block.text for text in ("TextBytes", "cluster = join(", "split_nnx(", "def plain_step"))


def is_tutorial(block: Block) -> bool:
    """``test_language_tutorial.py`` runs these, and compares what they print."""
    return block.path.name == "schedules.md" and "print(" in block.text


def test_everything_that_is_said_of_examples_is_about_one() -> None:
    for text in (*SKETCHES, *GIVEN, *AFTER):
        block_with(text)


@pytest.mark.parametrize(
    "block",
    [b for b in PYTHON if not (is_sketch(b) or is_long(b) or is_tutorial(b))],
    ids=str,
)
def test_examples_run(block: Block, tmp_path: Path) -> None:
    done = run_code(program(block), tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_flax_model_trains_as_its_plain_loop(tmp_path: Path) -> None:
    done = run_code(program(block_with("def plain_step")), tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert [step for step, _, _ in shown] == list(range(5))
    assert [loss for _, loss, _ in shown] == pytest.approx([plain for _, _, plain in shown], rel=1e-6)
    assert shown[-1][1] < shown[0][1]


@pytest.mark.slow
def test_the_library_s_model_learns(tmp_path: Path) -> None:
    done = run_code(block_with("TextBytes").text, tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if len(line.split()) == 1]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_a_program_of_one_s_own_runs_in_four_processes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(program(block_with("cluster = join(")))
    environment = of_child() | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.launch", "--processes", "4", "--", "own"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if "Gloo" not in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
