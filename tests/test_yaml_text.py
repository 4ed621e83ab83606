"""YAML as people mean it, in every file of ours that they may write."""

from pathlib import Path

import pytest
import yaml

from rrfp_jax.hf.model_folder import open_model
from rrfp_jax.yaml_text import read_yaml


@pytest.mark.parametrize(("text", "value"), [("10:12", "10:12"), ("12", 12), ("1.5", 1.5), ("0x10", 16), ("yes", True)])
def test_only_what_looks_like_a_number_is_one(text: str, value: object) -> None:
    assert read_yaml(f"key: {text}") == {"key": value}


def test_a_models_folder_is_read_so_too(tmp_path: Path) -> None:
    sizes = "{vocab_size: 8, hidden: 8, num_layers: 1, num_heads: 1, mlp_dim: 8}"
    (tmp_path / "config.yaml").write_text(f"model: {sizes}\nrun: {{init_from: 10:12, steps: 3}}\n")
    assert open_model(tmp_path, "the folder").config["run"] == {"init_from": "10:12", "steps": 3}


@pytest.mark.parametrize("text", ["model: 2024-02-31", "model: [", "model: \xff"])
def test_a_models_folder_that_is_no_yaml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^the folder .*model\.yaml cannot be read \(no YAML\): import"):
        open_model(tmp_path, "the folder")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &x [1]\nb: *x", "an alias"),
        ("a: &x {b: *x}", "an alias"),
        ("a: &x {b: 1}\nc: {<<: *x}", "an alias"),
        ("a: " + "[" * 20_000, "nested more than 50 deep"),
        ("a: [" + "1," * 60_000 + "1]", "more than 50000 values"),
        ("a: " + "x" * (1 << 20), "more than 1,048,576 characters"),
    ],
    ids=["alias", "itself", "merged", "deep", "many", "long"],
)
def test_yaml_without_bounds_is_refused(text: str, why: str) -> None:
    with pytest.raises(yaml.YAMLError, match=why):
        read_yaml(text)
