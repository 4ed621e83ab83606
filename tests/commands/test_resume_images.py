"""Image files by the command: killed in the middle of an epoch, going on in another layout; and what is refused."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from rrfp_jax.data.sample_order import items_of
from rrfp_jax.exit_codes import DATA_UNREADABLE
from tests.commands.running import ROOT, run_afresh, run_command, sentence
from tests.environment import of_child

NUM_LINES, BATCH_SIZE, NUM_MORE = 11, 4, 5
"""An epoch ends within a step, and no number of steps below 11 is a whole number of epochs."""
SIZES = {"a.png": (16, 16), "b.png": (32, 16), "c.png": (16, 32), "d.jpg": (48, 16)}
OTHER_LAYOUT = (
    *("--num-stages", 3, "--layout", "Pv@0|p@1|Et@2|tL@1"),
    *("--data.num-microbatches", 4, "--data.pack", "false"),
    *("--data.images", "{balance: false, gather_text: false}"),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a small model and eleven lines, with no, one or several of four image files."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8)).save(folder / name)
    lines = []
    for number in range(NUM_LINES):
        images = rng.choice(sorted(SIZES), size=number % 4).tolist()
        lines.append({"text": "<image>" * len(images) + f"sample {number} " * (1 + number % 3), "images": images})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sections: dict[str, Any] = yaml.safe_load((ROOT / "tpu_gpu_configs/cpu/multimodal.yaml").read_text())
    small = {"hidden": 16, "num_heads": 2, "mlp_dim": 16}
    sections["model"] |= small | {"init_std": 0.2}
    sections["vision"] |= small | {"patch_dim": 192, "grid": [4, 6], "overrides": {"qkv_bias": False}}
    sections["data"] = {
        "kind": "image_text", "path": str(folder / "data.jsonl"), "batch_size": BATCH_SIZE, "num_microbatches": 2,
        "images": {"patch_size": 8, "text_buckets": 1, "image_buckets": 1, "gather_text": True},
    }  # fmt: skip
    sections["pipeline"] |= {"num_stages": 2}
    sections["optimizer"] = {"learning_rate": 1e-3, "final_learning_rate": 1e-3}
    sections["run"] |= {"steps": 100_000, "checkpoint_every": 1}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def lines_of(config: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.parent / "data.jsonl").read_text().splitlines()]


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def killed(config: Path, run: Path, num_rows: int) -> None:
    """Train, and be killed once so many steps are recorded."""
    words = [sys.executable, "-m", "experiments.train", "--config", config, "--run-dir", run]
    with subprocess.Popen(list(map(str, words)), cwd=ROOT, env=of_child(), stdout=subprocess.DEVNULL) as process:
        for _ in range(6000):
            if process.poll() is not None or ((run / "metrics.jsonl").exists() and len(rows_of(run)) >= num_rows):
                break
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_within_an_epoch_goes_on_in_another_layout(config: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    killed(config, halves, 4)
    num_done = len(rows_of(halves))
    assert num_done < NUM_LINES - 1
    steps = num_done + NUM_MORE
    more = run_afresh("train", "--config", config, *OTHER_LAYOUT, "--steps", steps, "--run-dir", halves)
    assert more.returncode == 0, more.stderr
    straight = run_afresh("train", "--config", config, "--steps", steps, "--run-dir", whole)
    assert straight.returncode == 0, straight.stderr
    assert [row["step"] for row in rows_of(halves)] == [*range(steps)]
    losses = [[row["loss"] for row in rows_of(run)] for run in (halves, whole)]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    assert len({round(loss, 4) for loss in losses[0]}) == steps


@pytest.mark.parametrize("damage", ["missing", "no image", "broken off"])
@pytest.mark.one_in(3)
def test_an_image_that_cannot_be_used_is_refused(config: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(config.parent, tmp_path / "data")
    first_batch = {int(item) for item in items_of(0, batch_size=BATCH_SIZE, num=NUM_LINES, seed=0)}
    name, line = next(
        (each["images"][0], n + 1) for n, each in enumerate(lines_of(config)) if each["images"] and n in first_batch
    )
    file = tmp_path / "data" / name
    whole = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(b"no image" if damage == "no image" else whole[: len(whole) // 2])
    path = ("--data.path", tmp_path / "data" / "data.jsonl")
    result = run_command("train", "--config", config, *path, "--run-dir", tmp_path / "run", "--steps", 3)
    answer = sentence(result)
    assert f"image {file}, of line {line} of {path[1]}, cannot be" in answer
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_image_that_turns_out_broken_ends_the_run_with_a_sentence(config: Path, tmp_path: Path) -> None:
    """It is of the last line that an epoch comes to, so that some steps are done and saved."""
    shutil.copytree(config.parent, tmp_path / "data")
    path, file = tmp_path / "data" / "data.jsonl", tmp_path / "data" / "late.png"
    last = int(items_of(2, batch_size=BATCH_SIZE, num=NUM_LINES, seed=0)[NUM_LINES - 2 * BATCH_SIZE - 1])
    lines = lines_of(config)
    lines[last] = {"text": "<image>late", "images": [file.name]}
    path.write_text("\n".join(map(json.dumps, lines)))
    file.write_bytes((tmp_path / "data" / "a.png").read_bytes()[:300])
    result = run_afresh("train", "--config", config, "--data.path", path, "--run-dir", tmp_path / "run")
    assert result.returncode == DATA_UNREADABLE, result.stderr
    told, *notes = result.stderr.splitlines()
    assert told.startswith(f"error: image {file}, of line {last + 1} of {path}, cannot be decoded")
    (saved,) = notes
    assert saved.startswith("saved after step ")
    assert f"the run is in {tmp_path / 'run'}" in result.stdout.replace("\n", "")
