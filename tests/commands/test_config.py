"""``rrfp config``: keys explained, presets listed and shown."""

from dataclasses import fields
from pathlib import Path

import pytest

from rrfp_jax.commands import config
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.common.options import field_texts
from rrfp_jax.commands.training.config import SECTIONS, load_train_config
from rrfp_jax.commands.training.config_sources import preset_names

Captured = pytest.CaptureFixture[str]


def told(capsys: Captured, *arguments: str) -> str:
    assert config.main([*arguments]) == 0
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_key_is_explained_with_its_options_and_the_values_of_presets(capsys: Captured) -> None:
    text = flat(told(capsys, "--explain", "pipeline.window"))
    assert text.startswith(
        "pipeline.window The microbatches that a stage may hold, one number or one per stage, or their"
    )
    assert "null: as many as the schedule holds under foresight or strict, else 32." in text
    assert "type a whole number or a list of whole numbers or text default null" in text
    assert "option --window, --pipeline.window section pipeline: The cut of the model" in text
    assert "8 in cpu/debug, " in text
    assert " value " not in text


def test_choices_and_keys_that_a_file_must_give(capsys: Captured) -> None:
    assert "choices strict, foresight, ready, foresight+pairs option --consume" in flat(
        told(capsys, "--explain", "consume")
    )
    assert "default none: a file must give it" in flat(told(capsys, "--explain", "run.steps"))
    assert "option --vision section" in flat(told(capsys, "--explain", "vision.hidden"))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_explained_in_full_and_a_section_explains_its_keys(section: str, capsys: Captured) -> None:
    of_section = flat(told(capsys, "--explain", section))
    assert of_section.startswith(f"{section}: ")
    for field in fields(SECTIONS[section]):
        text = told(capsys, "--explain", f"{section}.{field.name}")
        assert field_texts(SECTIONS[section])[field.name] in flat(text)
        assert f" {section}.{field.name} " in of_section


def test_the_value_of_a_configuration_is_told(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "mine.yaml"
    text = load_train_config("cpu/debug", {"pipeline.window": [8, 6, 4, 2], "model.rope_scaling": {"factor": 8}})
    path.write_text(text.as_yaml())
    assert f"value 8,6,4,2 in {path}" in flat(told(capsys, "--explain", "window", "--config", str(path)))
    assert "value {factor: 8.0, kind: llama3, low_freq_factor: 1.0," in flat(
        told(capsys, "--explain", "rope_scaling", "--config", str(path))
    )
    assert "value {b1: 0.9, b2: 0.95, eps: 1.0e-08, nesterov: false, weight_decay: 0.1, feedback: false} in" in flat(
        told(capsys, "--explain", "optimizer.arguments", "--config", "cpu/debug")
    )
    assert "value no section vision in cpu/debug" in flat(
        told(capsys, "--explain", "vision.hidden", "--config", "cpu/debug")
    )
    assert "; 8 in cpu/debug)" in flat(told(capsys, "--explain", "pipeline", "--config", "cpu/debug"))


@pytest.mark.parametrize(
    ("key", "found"), [("num-stages", "pipeline.num_stages"), ("--run.seed", "run.seed"), ("window", "pipeline.window")]
)
def test_a_key_may_be_written_as_its_option_and_alone_where_it_is_the_only_one(
    key: str, found: str, capsys: Captured
) -> None:
    assert told(capsys, f"--explain={key}").startswith(f"{found}\n")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--explain", "hidden"], "'hidden' is a key of several sections: name one of model.hidden, vision.hidden"),
        (["--explain", "pipelin.window"], "'pipelin' is no section: did you mean pipeline"),
        (["--explain", "pipeline.windwo"], "'pipeline' has no key 'windwo': did you mean pipeline.window"),
        (["--explain", "run.window"], "'run' has no key 'window': did you mean pipeline.window"),
        (["--explain", "optimizer.zzz"], "'optimizer' has no key 'zzz': the keys of optimizer are learning_rate, "),
        (["--explain", "windwo"], "'windwo' is no key and no section: did you mean window"),
        (["--explain", "zzzzzz"], "'zzzzzz' is no key and no section: the sections are model, "),
        (["--show", "cpu/debgu"], "'cpu/debgu' is no preset: did you mean cpu/debug"),
        (["--explain", "hint", "--config", "cpu/debgu"], "configuration cpu/debgu is neither a file nor a preset: did"),
        (["--list", "--config", "cpu/debug"], "--config says what a file gives a key: give --explain KEY too"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(arguments: list[str], answer: str) -> None:
    with pytest.raises(BadInput) as refused:
        config.main(arguments)
    assert str(refused.value).startswith(answer)


def test_presets_are_listed_with_what_they_are(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = told(capsys, "--list")
    assert max(map(len, text.splitlines())) <= 80
    heads = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert heads == preset_names()
    assert "cpu/debug A byte-level language model on the text at hand," in flat(text)


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_that_is_shown_can_be_written_to_a_file(preset: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(told(capsys, "--show", preset))
    assert path.read_text().startswith("# ")
    assert load_train_config(str(path), {}) == load_train_config(preset, {})


def test_one_of_its_options_must_be_given(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        config.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: one of the arguments --explain --list --show --completion is required\n"


def test_a_part_of_the_ranks_holds_fewer_whole_replicas():
    given = {"pipeline.num_stages": 2, "pipeline.replicas": 4, "optimizer.shard": True, "data.num_microbatches": 8}
    config = load_train_config("cpu/debug", given)
    assert config.on_part_of_ranks(8, 8) == config
    parts = {number: config.on_part_of_ranks(number, 8) for number in (4, 2)}
    assert [(each.pipeline.replicas, each.optimizer.shard) for each in parts.values()] == [(2, True), (1, False)]
    assert all(each.data == config.data for each in parts.values())
    for number, held in ((6, 3), (1, 0.5), (5, 2.5)):
        with pytest.raises(ValueError, match=rf"{number} of 8 ranks hold {held:g} replicas .* 8 microbatches: give"):
            config.on_part_of_ranks(number, 8)
