"""The newcomer's way: a file of chats and a small Qwen, imported, trained in a pipeline, exported, and asked by
transformers."""

import json
from pathlib import Path

import pytest
import yaml

from tests.commands.running import run_command
from tests.data.chats import save_tokenizer, write_chats

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.hf import hub_models  # noqa: E402 - it needs both

_LEGS = {"spider": "It has eight.", "fly": "It has six.", "dog": "It has four.", "bird": "It has two."}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_small_qwen_learns_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    questions = {animal: [{"role": "user", "content": f"How many legs has a {animal}?"}] for animal in _LEGS}
    answers = {animal: {"role": "assistant", "content": answer} for animal, answer in _LEGS.items()}
    chats = [[*questions[one], answers[one], *questions[two], answers[two]] for one in _LEGS for two in _LEGS]
    write_chats(tmp_path / "chats.jsonl", chats)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = hub_models.made("qwen3", {"vocab_size": 400, "num_key_value_heads": 2, "head_dim": 16, **sizes}, 1)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    hub_models.save(model, save_tokenizer(tmp_path / "theirs", "chatml"))

    done = run_command("convert", "import", tmp_path / "theirs", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    sections = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text()) | {
        "data": {"path": str(tmp_path / "chats.jsonl"), "column": "messages", "pack": True, "length": 128},
        "evaluation": {"every": 30, "sets": {"all": {"path": str(tmp_path / "chats.jsonl")}}},
        "pipeline": {"num_stages": 2},
        "optimizer": {"learning_rate": 5e-3},
        "run": {"platform": "cpu", "init_from": str(tmp_path / "ours"), "run_dir": str(tmp_path / "run")},
    }
    sections["data"] |= {"batch_size": 8, "num_microbatches": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    for steps in (60, 120):  # the second command goes on with the same tokens
        done = run_command("train", "--config", tmp_path / "run.yaml", "--steps", steps)
        assert done.returncode == 0, done.stderr
        assert "are of the assistant's turns" in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.1 < losses[0]

    done = run_command("convert", "export", tmp_path / "run", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    theirs = hub_models.load(tmp_path / "back")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for animal, answer in _LEGS.items():
        asked = tokenizer.apply_chat_template(
            questions[animal], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = theirs.generate(**asked, max_new_tokens=30, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert tokenizer.decode(made[0, asked["input_ids"].shape[1] :]) == f"{answer}<|im_end|>"
