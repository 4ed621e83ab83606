"""Sampling: greedy as whole forwards say, drawn by a seed, with images; vocabularies; what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from PIL import Image
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.commands import sample
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.sampling.generating import Drawing, Generator, TokenPrompt
from rrfp_jax.commands.sampling.prompts import Bytes, Tokenizer, vocabulary_of
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.data.tokens import write_token_set
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import ModelFolder, ModelSections
from tests.commands.running import run_command
from tests.commands.test_train_multimodal import MULTIMODAL, small
from tests.hf.random_folder import write_folder
from tests.models.test_decoding import PLAIN, initial, whole_logits

DEBUG = "tpu_gpu_configs/cpu/debug.yaml"
TINY = ("--hidden", 16, "--num-heads", 2, "--num-kv-heads", 2, "--mlp-dim", 16, "--length", 32, "--max-bytes", 50_000)


def greedy_by_forwards(model: Any, params: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest token, again and again, each by a whole forward."""
    logits_of = jax.jit(lambda params, tokens: whole_logits(model, params, tokens))
    row = np.zeros((1, len(prompt) + count), np.int32)
    row[0, : len(prompt)] = prompt
    for at in range(len(prompt), row.shape[1]):
        row[0, at] = np.argmax(logits_of(params, row)[0, at - 1])
    return row[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_whole_forwards_and_a_stop_ends_them() -> None:
    model = replace(PLAIN, num_kv_heads=1, sliding_window=6)
    params = initial(model)
    generator, prompt = Generator(model, params), [3, 1, 4, 1, 5]
    tokens = TokenPrompt(tokens=np.array(prompt, np.int32))
    made = generator.tokens(tokens, Drawing(max_tokens=20)).tolist()
    assert made == greedy_by_forwards(model, params, prompt, 20)
    stop = made[7]
    assert generator.tokens(tokens, Drawing(max_tokens=20), stops=[stop]).tolist() == made[: made.index(stop)]
    assert generator.tokens(tokens, Drawing(max_tokens=1)).tolist() == made[:1]


def test_the_seed_decides_what_is_drawn() -> None:
    generator = Generator(PLAIN, initial(PLAIN))
    prompt = TokenPrompt(tokens=np.array([1, 2], np.int32))

    def drawn(**fields: Any) -> list[int]:
        return generator.tokens(prompt, Drawing(max_tokens=30, temperature=1.0, **fields)).tolist()

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    assert drawn(seed=1, top_p=1e-6) == generator.tokens(prompt, Drawing(max_tokens=30)).tolist()
    with pytest.raises(ValueError, match=r"parameters of layers\.1 are missing"):
        Generator(PLAIN, {name: layer for name, layer in initial(PLAIN).items() if name != "layers.1"})


def saved(tokenizer: Library, path: Path) -> Path:
    tokenizer.save(str(path))
    return path


def test_bytes_are_written_and_read() -> None:
    assert Bytes().encode("né").tolist() == [110, 195, 169]
    assert Bytes().decode([110, 195, 169, 195]) == "né\ufffd"
    for text, words in (("", "the prompt is empty"), ("a\udc80", "which is no character: take it out")):
        with pytest.raises(ValueError, match=words):
            Bytes().encode(text)


def test_tokenizers_of_files_refuse_what_they_cannot_write(tmp_path: Path) -> None:
    words = Library(WordLevel({"<unk>": 0, "a": 1, "b": 2, "<s>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    plain = Tokenizer(saved(words, tmp_path / "plain.json"))
    assert plain.encode("b a").tolist() == [2, 1]
    with pytest.raises(ValueError, match="no token for 'ü' of the prompt"):
        plain.encode("a ü")
    with pytest.raises(ValueError, match="the prompt is empty, and the tokenizer has no start token"):
        plain.encode("")
    assert Tokenizer(tmp_path / "plain.json", start=2).encode("").tolist() == [2]
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    with_start = Tokenizer(saved(words, tmp_path / "start.json"))
    assert with_start.encode("").tolist() == [3]
    assert with_start.encode("a").tolist() == [3, 1]
    assert Tokenizer(tmp_path / "start.json", opens=False).encode("a").tolist() == [1]
    pieces = Tokenizer(saved(Library(BPE({"a": 0, "b": 1}, [])), tmp_path / "pieces.json"))
    with pytest.raises(ValueError, match="no token for 'c' of the prompt"):
        pieces.encode("abc")
    without = Tokenizer(saved(Library(WordLevel({"a": 0})), tmp_path / "without.json"))
    with pytest.raises(ValueError, match="the tokenizer cannot write the prompt"):
        without.encode("b")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match=r"none\.json is no file of the tokenizers library"):
        Tokenizer(tmp_path / "none.json")


def test_a_vocabulary_is_that_of_the_run_s_data(tmp_path: Path) -> None:
    words = Library(WordLevel({"<eos>": 0, "a": 1, "b": 2}))
    words.pre_tokenizer = Whitespace()
    write_token_set(
        tmp_path / "set",
        [np.array([1, 2, 1], np.uint32)],
        vocab_size=3,
        end_of_document=0,
        tokenizer=saved(words, tmp_path / "words.json").read_bytes(),
    )

    def found(config: dict[str, Any], given: str | None = None) -> Any:
        model = ModelSections(model=PLAIN)
        return vocabulary_of(ModelFolder(path=tmp_path, sections=model, config=config), given)

    for config in (
        {"data": {"kind": "tokens", "path": [str(tmp_path / "set")]}},
        {"data": {"kind": "jsonl", "tokenizer": str(tmp_path / "words.json"), "end_of_document": "<eos>"}},
    ):
        vocabulary = found(config)
        assert (vocabulary.encode("b a").tolist(), vocabulary.stops) == ([2, 1], (0,))
        assert vocabulary.encode("").tolist() == [0]  # rows go on across documents
        assert vocabulary.decode([1, 2]) == "a b"
    with pytest.raises(ValueError, match="has no start token"):
        found(
            {
                "data": {
                    "kind": "jsonl",
                    "tokenizer": str(tmp_path / "words.json"),
                    "end_of_document": "<eos>",
                    "pack": True,
                }
            }
        ).encode("")
    assert found({"data": {"kind": "parquet"}}).stops == (0,)
    assert found({"data": {"kind": "image_text"}}).stops == (0,)
    assert found({"data": {"kind": "own"}}, "bytes").encode("a").tolist() == [97]
    with pytest.raises(ValueError, match=r"does not say what its tokens are: give the tokenizer\.json"):
        found({"data": {"kind": "own"}})


def refused(*arguments: object) -> str:
    with pytest.raises(BadInput) as error:
        sample.main([*map(str, arguments)])
    return str(error.value)


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert f"the model {run} has neither model.yaml nor config.yaml" in refused(run, "--prompt", "a")
    (run / "config.yaml").write_text(load_train_config(DEBUG, {}).as_yaml())
    Image.new("L", (20, 16)).save(tmp_path / "word.png")
    assert "is a model of text, which sees no images" in refused(run, "--prompt", "a", "--image", tmp_path / "word.png")
    assert "the prompt is empty" in refused(run)
    assert "temperature is -1.0: give 0 or more" in refused(run, "--prompt", "a", "--temperature", -1)
    assert "top_p is 0.0: give a number above 0, at most 1" in refused(run, "--prompt", "a", "--top-p", 0)
    assert "max_tokens is 0: give at least 1" in refused(run, "--prompt", "a", "--max-tokens", 0)
    assert "seed is -1" in refused(run, "--prompt", "a", "--seed", -1)
    assert "holds no checkpoint" in refused(run, "--prompt", "a")
    assert "there is no tokenizer" in refused(run, "--prompt", "a", "--tokenizer", tmp_path / "none.json")
    assert "prompt file" in refused(run, "--prompt-file", tmp_path / "none.txt")


@pytest.mark.slow
def test_a_run_of_two_stages_is_sampled_on_one_device(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_command("train", "--config", DEBUG, *TINY, "--steps", 30, "--num-stages", 2, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    told = run_command("sample", run, "--prompt", "def f(", "--max-tokens", 24)
    assert told.returncode == 0, told.stderr
    model = load_train_config(str(run / "config.yaml"), {}).model
    params = read_params(newest_step(run / "checkpoints"))
    expected = greedy_by_forwards(model, params, list(b"def f("), 24)
    assert told.stdout == f"{Bytes().decode(expected)}\n"
    drawn = [
        run_command("sample", run, "--prompt", "def f(", "--temperature", 1, "--top-p", 0.9, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_runs_that_see_are_shown_images(tmp_path: Path) -> None:
    Image.new("L", (40, 16), 255).save(tmp_path / "word.png")
    Image.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / "red.png")
    run = tmp_path / "words"
    done = run_command("train", "--config", MULTIMODAL, *small(), "--steps", 2, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    told = run_command("sample", run, "--image", tmp_path / "word.png", "--prompt", "\n", "--max-tokens", 8)
    assert told.returncode == 0, told.stderr
    assert "ends in an image" in run_command("sample", run, "--image", tmp_path / "word.png").stderr
    twice = run_command("sample", run, "--image", tmp_path / "word.png", "--prompt", "<image> <image>a")
    assert "the prompt has 2 times <image> and 1 images are given" in twice.stderr
    assert twice.returncode == 2
    wide = tmp_path / "wide.png"
    Image.new("L", (4000, 16), 255).save(wide)
    assert (
        "patch_columns of the prompt go from 0 to"
        in run_command("sample", run, "--image", wide, "--prompt", "\n").stderr
    )

    lines = [{"prompt": "<image>colour: ", "target": "red", "images": ["red.png"]}] * 16
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = yaml.safe_load(Path(MULTIMODAL).read_text())
    sections["data"] = {
        "kind": "image_text",
        "path": str(tmp_path / "texts.jsonl"),
        "images": {"patch_size": 8},
        "batch_size": 8,
        "num_microbatches": 4,
    }
    sections["vision"]["patch_dim"] = 3 * 64
    sections["vision"]["grid"] = [8, 8]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    run = tmp_path / "colours"
    done = run_command("train", "--config", tmp_path / "run.yaml", "--steps", 40, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    told = run_command("sample", run, "--image", tmp_path / "red.png", "--prompt", "<image>colour: ")
    assert told.returncode == 0, told.stderr
    assert told.stdout == "red\n"


@pytest.mark.slow
def test_an_imported_model_is_sampled_with_its_tokenizer(tmp_path: Path) -> None:
    theirs, ours = write_folder(tmp_path / "theirs"), tmp_path / "ours"
    words = Library(WordLevel({f"w{number}": number for number in range(256)}))
    words.pre_tokenizer = Whitespace()
    saved(words, theirs / "tokenizer.json")
    write_import(plan_import(theirs), ours)
    told = run_command("sample", ours, "--prompt", "w7 w8 w9", "--max-tokens", 6)
    assert told.returncode == 0, told.stderr
    model = ModelSections.of(yaml.safe_load((ours / "model.yaml").read_text()), "the test").model
    expected = greedy_by_forwards(model, read_params(newest_step(ours / "checkpoints")), [7, 8, 9], 6)
    assert told.stdout.split() == [f"w{number}" for number in expected]
    far = run_command("sample", ours, "--prompt", "w7 w8", "--max-tokens", 511)
    assert "the prompt has 2 tokens, and max_tokens is 511, but the model has 512 positions: give fewer" in far.stderr
    assert far.returncode == 2
    image = run_command("sample", ours, "--prompt", "w7", "--image", "word.png")
    assert "is a model of text, which sees no images" in image.stderr
