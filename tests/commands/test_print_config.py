"""``rrfp train --print-config``: the resolved configuration, as a file that loads as the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_jax.commands import train
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.config_sources import preset_names
from tests.commands.running import ROOT

OPTIONS = {
    "cpu/debug": [
        "--window",
        "8,6,4,2",
        "--run.seed",
        "7",
        "--optimizer.freeze",
        "embedding,layer_0",
        "--num-kv-heads",
        "null",
    ],
    "gpu/one_node_8": ["--rope-scaling", "{factor: 8, original_max_positions: 4096}", "--memory-limit", "16GiB"],
    "cpu/multimodal": ["--vision", "{num_layers: 3, overrides: {norm_eps: 1.0e-7}}", "--data.images", "{mean: 0.4}"],
}

LIGHT = (
    ("train", "--config", "cpu/multimodal", "--print-config"),
    ("train", "--help"),
    ("config", "--explain", "pipeline", "--config", "cpu/multimodal"),
    ("config", "--list"),
    ("config", "--completion", "bash"),
)
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "matplotlib", "plotly"}


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_printed_loads_as_the_same_and_nothing_runs(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = OPTIONS.get(preset, [])
    assert train.main(["--config", preset, *options, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    Path("mine.yaml").write_text(printed)
    assert train.main(["--config", "mine.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    config = load_train_config("mine.yaml", {})
    given = train.make_parser().parse_args(["--config", preset, *options])
    assert config == load_train_config(preset, train.overrides_of(given))
    assert (config == load_train_config(preset, {})) == (not options)


@pytest.mark.parametrize(
    "name", ["try #2", "20261126", "2026-11-26", "no", "1_000", "&x", "*x", "!x", "null", "'q'", "a: b"]
)
@pytest.mark.parametrize("name_of", ["run.run_dir", "data.path"])
def test_a_path_is_taken_as_it_stands(name: str, name_of: str) -> None:
    given = train.make_parser().parse_args(["--config", "cpu/debug", f"--{name_of.replace('_', '-')}", name])
    assert train.overrides_of(given) == {name_of: name}


def test_a_name_that_yaml_takes_for_something_else_is_to_be_quoted_in_a_file(tmp_path: Path) -> None:
    text = (ROOT / "tpu_gpu_configs/cpu/debug.yaml").read_text()
    for name in ("2026-11-26", "20261126", "no"):
        (tmp_path / "run.yaml").write_text(text.replace("run:\n", f"run:\n  run_dir: {name}\n"))
        shown = "False" if name == "no" else name
        with pytest.raises(ValueError, match=f"run.run_dir is {shown}: give text, in quotes$"):
            load_train_config(str(tmp_path / "run.yaml"), {})


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("cluster.interface", "2026-11-26", "2026-11-26"),
        ("cluster.interface", "null", None),
        ("run.trackers", "wandb,mlflow", ["wandb", "mlflow"]),
        ("run.trackers", "[{wandb: {mode: offline}}]", [{"wandb": {"mode": "offline"}}]),
        ("pipeline.layout", "Et*2|(t*3|)*4t*2L", "Et*2|(t*3|)*4t*2L"),
        ("optimizer.arguments", "{b2: 0.9}", {"b2": 0.9}),
        ("run.init_from", "null", None),
        ("run.init_from", "", None),
        ("data.column", "null", None),
        ("data.path", "a b, no", "a b, no"),
        ("data.kind", "jsonl", "jsonl"),
        ("optimizer.freeze", "[]", []),
        ("pipeline.window", "4,4,3,3", [4, 4, 3, 3]),
        ("pipeline.window", "null", None),
        ("pipeline.memory_limit", "16GiB", "16GiB"),
        ("pipeline.mesh", "{tensor: 2}", {"tensor": 2}),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("run.deterministic", "no", False),
        ("model.hidden", "1_000", 1000),
    ],
)
def test_what_options_mean(option: str, text: str, value: object) -> None:
    flag = f"--{option.replace('_', '-')}"
    given = train.overrides_of(train.make_parser().parse_args(["--config", "cpu/debug", flag, text]))[option]
    assert (float(given) if isinstance(value, float) else given) == value


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("try #2", ("try #2",)),
        ("a b, no,2026-11-26", ("a b", "no", "2026-11-26")),
        ("[x, 'a, b', \"1\"]", ("x", "a, b", "1")),
    ],
)
def test_several_paths_where_the_kind_of_data_takes_them(text: str, paths: tuple[str, ...]) -> None:
    options = ["--config", "cpu/debug", "--data.kind", "jsonl", "--path", text]
    given = train.overrides_of(train.make_parser().parse_args(options))
    assert load_train_config("cpu/debug", given).as_dict()["data"]["path"] == [*paths]


def test_bad_values_are_refused_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match=r"^--num-layers -1: model: num_layers is -1: give"):
        train.main(["--config", "cpu/debug", "--num-layers", "-1", "--print-config"])
    with pytest.raises(BadInput, match="neither a file nor a preset: did you mean cpu/debug"):
        train.main(["--config", "cpu/debgu", "--print-config"])
    assert capsys.readouterr().out == ""


def test_no_library_that_computes_or_draws_is_loaded() -> None:
    code = f"""
import sys
from rrfp_jax.commands.main import main
for words in {LIGHT!r}:
    sys.argv = ["rrfp", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    loaded = {HEAVY!r} & set(sys.modules)
    assert not loaded, (words, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model:\n")
