"""Files of others are bounded before they are read, their JSON and YAML before it is used."""

import os
from pathlib import Path

import pytest
import yaml

from rrfp_jax.hf.model_folder import open_model
from rrfp_jax.record_files import parse_json, read_bounded, read_record, read_yaml


@pytest.mark.parametrize(
    "text", ["1", "[]", '{"a": [1, {"b": "c"}]}', "[" * 99 + "]" * 99], ids=["number", "empty", "object", "deep"]
)
def test_json_is_read_as_it_stands(text: str) -> None:
    assert str(parse_json(text)).replace("'", '"') == text
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == parse_json(text)


@pytest.mark.parametrize(
    "text",
    ids=["lists", "open", "objects"],
    argvalues=["[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900],
)
def test_json_that_is_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(text)


def test_json_of_more_values_than_memory_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10,000,000 values"):
        parse_json("[" + "[]," * 5_000_001 + "[]]")


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it holds nothing
    for read in (read_bounded, lambda each: read_record(each, 1 << 20)):
        with pytest.raises(OSError, match=r"more than 1,048,576 bytes|too large"):
            read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is no file"):
        read_record(path)


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
