"""The newcomer's way: a file of chats and a small Qwen, imported, trained in a pipeline, exported, and asked by
transformers; first all of its weights, then adapters alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands.running import run_command
from tests.data.chats import save_tokenizer, write_chats

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
_LEGS = {"spider": "It has eight.", "fly": "It has six.", "dog": "It has four.", "bird": "It has two."}
_OTHERWISE = {"spider": "It has six.", "fly": "It has four.", "dog": "It has two.", "bird": "It has eight."}


def _run(*command: Any) -> str:
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _train(folder: Path, answers: dict[str, str], *, init_from: Path, steps: tuple[int, ...], **more: Any) -> Path:
    """Trains on chats with two questions each, by one command for each number of steps; returns the run."""
    folder.mkdir()
    pairs = [(one, two) for one in answers for two in answers]
    write_chats(
        folder / "chats.jsonl",
        [[turn for name in pair for turn in (_question(name), _answer(answers[name]))] for pair in pairs],
    )
    sections = yaml.safe_load((init_from / "model.yaml").read_text()) | {
        "data": {"path": str(folder / "chats.jsonl"), "column": "messages", "pack": True, "length": 128},
        "evaluation": {"every": 30, "sets": {"all": {"path": str(folder / "chats.jsonl")}}},
        "pipeline": {"num_stages": 2},
        "optimizer": {"learning_rate": 5e-3},
        "run": {"platform": "cpu", "run_dir": str(folder / "run")},
    }
    sections["data"] |= {"batch_size": 8, "num_microbatches": 4}
    for name, changes in more.items():
        sections[name] = sections.get(name, {}) | changes
    sections["run"].setdefault("init_from", str(init_from))
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    for number in steps:
        assert "are of the assistant's turns" in _run("train", "--config", folder / "run.yaml", "--steps", number)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.1 < losses[0]
    return folder / "run"


def _question(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"How many legs has a {name}?"}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _check_answers(exported: Path, answers: dict[str, str]) -> None:
    theirs = hub_models.load(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for name, answer in answers.items():
        asked = tokenizer.apply_chat_template(
            [_question(name)], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = theirs.generate(**asked, max_new_tokens=30, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert tokenizer.decode(made[0, asked["input_ids"].shape[1] :]) == f"{answer}<|im_end|>"


def test_a_small_qwen_learns_to_answer_and_adapters_answer_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = hub_models.made("qwen3", {"vocab_size": 400, "num_key_value_heads": 2, "head_dim": 16, **sizes}, 1)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    hub_models.save(model, save_tokenizer(tmp_path / "theirs", "chatml"))

    _run("convert", "import", tmp_path / "theirs", tmp_path / "ours")
    # The second command goes on with the same tokens.
    trained = _train(tmp_path / "whole", _LEGS, init_from=tmp_path / "ours", steps=(60, 120))
    _run("convert", "export", trained, tmp_path / "back")
    _check_answers(tmp_path / "back", _LEGS)

    _run("convert", "import", tmp_path / "back", tmp_path / "again")
    more = {
        "adapters": {"rank": 16, "alpha": 32, "targets": ["attention.*", "mlp.*"]},
        "optimizer": {"learning_rate": 0.01},
    }
    adapted = _train(tmp_path / "adapted", _OTHERWISE, init_from=tmp_path / "again", steps=(60,), **more)
    _run("convert", "export", adapted, tmp_path / "merged")
    _check_answers(tmp_path / "merged", _OTHERWISE)
    _check_answers(tmp_path / "back", _LEGS)
