"""Data, model, run and export agree on which tokens their numbers stand for, or the run is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rrfp_jax.commands.sampling.prompts import vocabulary_of
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.data_sets import token_notes
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.data.tokenizing import TokenizeOptions, tokenize
from rrfp_jax.hf.exporting import plan_export, write_export
from rrfp_jax.hf.importing import plan_import, write_import
from rrfp_jax.hf.model_folder import KEPT, TOKENS, open_model
from rrfp_jax.training.run_directory import RunDirectory
from tests.commands.running import run_command, sentence
from tests.hf.random_folder import TINY_LLAMA, write_folder

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all\n"
END = "<|endoftext|>"
ROWS = {"length": 16, "batch_size": 4, "num_microbatches": 2}
GOLDEN = Path(__file__).parents[1] / "hf" / "golden"


def tokenizer_file(path: Path, *, size: int = 270, specials: tuple[str, ...] = (END,)) -> Path:
    """A byte-level BPE, in a folder with the settings that name its end of a text."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*specials], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": specials[0]}))
    return path / "tokenizer.json"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an import that has a tokenizer, token sets of its and of another one, and lines of text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs = write_folder(tmp_path / "theirs", TINY_LLAMA | {"vocab_size": 320, "num_hidden_layers": 2})
    tokenizer_file(theirs)
    write_import(plan_import(theirs), tmp_path / "imp")
    tokenizer_file(tmp_path / "other", specials=("<|im_end|>", END))
    (tmp_path / "text.txt").write_text(TEXT * 20)
    (tmp_path / "lines.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 20)
    for name in ("theirs", "other"):
        tokenize(["text.txt"], f"set_{name}", TokenizeOptions(tokenizer=name), workers=1)
    return tmp_path


def written(start: str | None = "imp", **sections: Any) -> str:
    """The configuration of a run that starts from the import."""
    model = yaml.safe_load(Path("imp/model.yaml").read_text())
    rest = {"pipeline": {"num_stages": 2}, "optimizer": {"learning_rate": 1e-3}}
    run = {"steps": 2, "platform": "cpu", "init_from": start}
    Path("run.yaml").write_text(yaml.safe_dump(model | rest | {"run": run} | sections))
    return "run.yaml"


def planned(start: str | None = "imp", *, run: str = "run", force: bool = False, **sections: Any) -> Any:
    return plan_run(load_train_config(written(start, **sections), {}, trust=True), Path(run), force=force)


def forced(**sections: Any) -> None:
    assert planned(force=True, **sections).dataset is not None


def test_tokens_of_another_tokenizer_are_refused(work: Path) -> None:
    section = {"path": "set_other", **ROWS}
    with pytest.raises(
        ValueError,
        match=r"the tokens of the data are those of the tokenizer set_other/tokenizer\.json, and the model in "
        r"imp knows those of the tokenizer imp/hugging-face/tokenizer\.json: tokenize the text with ",
    ):
        planned(data={"kind": "tokens", **section})
    forced(data={"kind": "tokens", **section})
    run = planned(data={"kind": "tokens", "path": "set_theirs", **ROWS})
    assert token_notes(run.dataset, run.known) == []


def test_a_tokenizer_that_was_only_written_anew_is_the_same(work: Path) -> None:
    Path("again").mkdir()
    tokenizer = Tokenizer.from_file("theirs/tokenizer.json")
    tokenizer.enable_truncation(4)
    tokenizer.save("again/tokenizer.json", pretty=False)
    tokenize(["text.txt"], "set_again", TokenizeOptions(tokenizer="again"), workers=1)
    planned(data={"kind": "tokens", "path": "set_again", **ROWS})


def test_bytes_are_refused_for_a_model_with_a_tokenizer(work: Path) -> None:
    tokenize(["text.txt"], "set_bytes", TokenizeOptions(), workers=1)
    for section in (
        {"data": {"path": "text.txt", **ROWS}},
        {"data": {"kind": "jsonl", "path": "lines.jsonl", "tokenizer": "bytes", **ROWS}},
        {"data": {"kind": "tokens", "path": "set_bytes", **ROWS}},
        {
            "data": {
                "kind": "image_text",
                "path": "lines.jsonl",
                "tokenizer": "bytes",
                "batch_size": 4,
                "num_microbatches": 2,
            }
        },
    ):
        with pytest.raises(ValueError, match="the tokens of the data are bytes, and the model in imp knows"):
            planned(**section)
        forced(**section)
    shutil.copytree("theirs", "old")
    Path("old/tokenizer.json").rename("old/tokenizer.model")
    write_import(plan_import(Path("old")), Path("old_imp"))
    with pytest.raises(ValueError, match="has a tokenizer in a form that is not read here: save it as token"):
        planned("old_imp", data={"path": "text.txt", **ROWS})


def test_files_without_a_tokenizer_take_that_of_the_model(work: Path) -> None:
    run = planned(data={"kind": "jsonl", "path": "lines.jsonl", **ROWS})
    own = planned(data={"kind": "tokens", "path": "set_theirs", **ROWS}).dataset
    assert run.dataset.token_kind.is_same(own.token_kind)
    assert run.dataset.vocab_size == own.vocab_size
    lines = planned(data={"kind": "image_text", "path": "lines.jsonl", "batch_size": 4, "num_microbatches": 2}).dataset
    tokenizer = Tokenizer.from_file("theirs/tokenizer.json")
    assert lines.samples(0)[0].tokens.tolist() == tokenizer.encode(TEXT).ids
    assert lines.samples(0)[0].targets[-1] == tokenizer.token_to_id(END)
    begins_here = planned(None, data={"kind": "jsonl", "path": "lines.jsonl", **ROWS})
    assert begins_here.dataset.token_kind.is_bytes


def test_what_nobody_can_compare_is_told(work: Path) -> None:
    (work / "mine.py").write_text(
        "import numpy as np\nrow = np.ones(8, int)\nrows = [dict(tokens=row, targets=row, weights=row)] * 8\n"
    )
    run = planned(data={"kind": "own", "object": "mine:rows", "batch_size": 2, "num_microbatches": 2})
    (note,) = token_notes(run.dataset, run.known)
    assert "the data does not say which tokens it has: they must be those of the tokenizer imp" in note
    Path("theirs/tokenizer.json").unlink()
    write_import(plan_import(Path("theirs")), Path("bare"))
    run = planned("bare", data={"path": "text.txt", **ROWS})
    (note,) = token_notes(run.dataset, run.known)
    assert "nothing in bare says which tokens its model knows" in note
    tokenize(["text.txt"], "ends", TokenizeOptions(tokenizer="imp/hugging-face", end_of_document="the"), workers=1)
    assert (
        planned(data={"kind": "tokens", "path": "ends", "tokenizer": "imp", **ROWS}).dataset.vocab_size == 270
    )  # an import's folder
    run = planned(data={"kind": "tokens", "path": "ends", **ROWS})
    (note,) = token_notes(run.dataset, run.known)
    assert "and the model in imp ends one with 0: end_of_document names another" in note


def test_evaluation_sets_are_compared_too(work: Path) -> None:
    sets = {"sets": {"theirs": {"path": "set_other"}}}
    with pytest.raises(
        ValueError, match=r"evaluation\.sets\.theirs: the tokens of the data are those of the tokenizer set_o"
    ):
        planned(data={"kind": "tokens", "path": "set_theirs", **ROWS}, evaluation=sets)


def exported(run: str, folder: str) -> dict[str, Any]:
    write_export(plan_export(Path(run)), Path(folder), shard_bytes=10**9)
    return json.loads(Path(folder, "config.json").read_text())


def trained(*options: object, run: str = "run", config: str = "run.yaml") -> Any:
    return run_command("train", "--config", Path(config).absolute(), "--run-dir", Path(run).absolute(), *options)


@pytest.mark.slow
def test_a_run_needs_its_import_no_longer_once_it_has_begun(work: Path) -> None:
    tokens = {"kind": "tokens", "path": str(work / "set_theirs"), "tokenizer": str(work / "imp"), **ROWS}
    written(str(work / "imp"), data=tokens | {"held_out": 0.2})
    assert trained().returncode == 0
    for name in ("imp", "set_other", "theirs"):
        shutil.rmtree(name)
    more = trained("--steps", 3)
    assert more.returncode == 0, more.stderr
    shutil.move("run", "moved")
    sampled = run_command("sample", work / "moved", "--prompt", "the quick", "--max-tokens", 2)
    assert sampled.returncode == 0, sampled.stderr
    evaluated = run_command("evaluate", work / "moved", "--batches", 1)
    assert evaluated.returncode == 0, evaluated.stderr
    config = exported("moved", "exp")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert Path("exp/tokenizer.json").read_bytes() == Path("moved", KEPT, "tokenizer.json").read_bytes()
    assert not Path("exp", TOKENS).exists()
    again = sentence(trained("--fresh", run="moved"))
    assert "has neither model.yaml nor config.yaml" in again


@pytest.mark.slow
def test_forced_tokens_go_into_the_run_and_the_export_in_place_of_the_import_s(work: Path) -> None:
    written(str(work / "imp"), data={"kind": "tokens", "path": str(work / "set_other"), **ROWS})
    assert "or give --force where it is to learn them" in sentence(trained())
    done = trained("--force")
    assert done.returncode == 0, done.stderr
    config = exported("run", "exp")
    assert Path("exp/tokenizer.json").read_bytes() == Path("other/tokenizer.json").read_bytes()
    assert json.loads(Path("exp/tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert config["eos_token_id"] == Tokenizer.from_file("other/tokenizer.json").token_to_id("<|im_end|>")


@pytest.mark.slow
def test_a_model_that_began_here_is_exported_with_its_tokenizer(work: Path) -> None:
    written(None, data={"kind": "jsonl", "path": str(work / "lines.jsonl"), "tokenizer": str(work / "other"), **ROWS})
    done = trained()
    assert done.returncode == 0, done.stderr
    shutil.rmtree("other")
    config = exported("run", "exp")
    assert config["eos_token_id"] == open_model(Path("run"), "the run").tokens().ends[0]
    settings = json.loads(Path("exp/tokenizer_config.json").read_text())
    assert settings == {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    vocabulary = vocabulary_of(open_model(Path("run"), "the run"), None)
    assert vocabulary.encode("the fox").tolist() == Tokenizer.from_file("exp/tokenizer.json").encode("the fox").ids
    # another run that starts from this one has its tokens
    with pytest.raises(ValueError, match="the model in run knows those of the tokenizer run/tokenizer/tok"):
        planned("run", run="next", data={"kind": "tokens", "path": "set_theirs", **ROWS})
    assert (
        planned("run", run="next", data={"kind": "jsonl", "path": "lines.jsonl", **ROWS}).dataset.token_kind.ends
        == vocabulary.stops
    )


def test_what_a_run_keeps_is_what_it_was_trained_with(work: Path) -> None:
    from rrfp_jax.hf.model_folder import keep_files

    run = Path("run")
    run.mkdir()
    shutil.copyfile("imp/model.yaml", run / "config.yaml")
    data, own = (
        planned(data={"kind": "tokens", "path": f"set_{name}", **ROWS}, force=True).dataset
        for name in ("other", "theirs")
    )
    for kind, name, ends in ((own.token_kind, "theirs", (0,)), (data.token_kind, "other", (0,))):
        keep_files(run, Path("imp/hugging-face"), kind)
        found = open_model(run, "the run").tokens()
        assert found is not None
        assert found.file == run / KEPT / "tokenizer.json"
        assert found.file.read_bytes() == Path(name, "tokenizer.json").read_bytes()
        assert found.ends == ends
    keep_files(run, run / KEPT, own.token_kind)  # from its own copies
    assert (run / KEPT / "tokenizer.json").read_bytes() == Path("theirs/tokenizer.json").read_bytes()
    shutil.copyfile("other/tokenizer.json", run / KEPT / "tokenizer.json")
    with pytest.raises(ValueError, match=r"is another tokenizer than the one that the run was trained with: put"):
        open_model(run, "the run").tokens()
    keep_files(run, Path("imp/hugging-face"), None)  # where nothing tells which tokens the data has
    assert open_model(run, "the run").tokens() is None
    assert RunDirectory(run).leftovers() == ["config.yaml", KEPT]
    (run / KEPT / TOKENS).unlink()
    assert RunDirectory(run).leftovers() == ["config.yaml"]  # somebody else's folder
    with pytest.raises(ValueError, match=r"run/tokenizer is not of this run, which keeps its tokenizer there: move it"):
        keep_files(run, Path("imp/hugging-face"), own.token_kind)
    (run / KEPT / TOKENS).write_text("{}")
    with pytest.raises(ValueError, match=r"tokens\.json is no record of tokens"):
        open_model(run, "the run").tokens()


def seeing(folder: Path, kind: str = "llava_siglip", names: Any = None) -> Path:
    """A model with words w0 to w28 as tokens, of which number 1 stands for images, 2 opens and 3 ends a text."""
    from tokenizers.processors import TemplateProcessing

    folder.mkdir()
    config = json.loads((GOLDEN / kind / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    shutil.copyfile(GOLDEN / kind / "model.safetensors", folder / "model.safetensors")
    names = {1: "<image>", 2: "<s>", 3: "</s>"} | (names or {})
    words: Any = Tokenizer(models.WordLevel({names.get(number, f"w{number}"): number for number in range(29)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    words.save(str(folder / "tokenizer.json"))
    return folder


PATCHES = {"patch_size": 2, "merge": 1, "image_size": 4, "channels": 1}
IMAGES = {"batch_size": 2, "num_microbatches": 1, "images": PATCHES}


def test_text_with_images_is_written_as_the_model_s_family_writes_it(work: Path) -> None:
    write_import(plan_import(seeing(work / "llava")), work / "seen")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(work / "a.png")
    lines = [
        {"prompt": "w5 <image> w6", "target": " w7 w8", "images": ["a.png"], "id": 7},
        {"text": "w9 <image><image> w10", "images": ["a.png", "a.png"]},
        {"prompt": "w5", "target": " w6", "images": None},
    ]
    (work / "seen.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = yaml.safe_load(Path("seen/model.yaml").read_text())
    # a patch that is a feature has no order: either word is right
    for row_order in (False, True):
        data = planned(
            "seen",
            run="seeing",
            data={"kind": "image_text", "path": "seen.jsonl", **IMAGES, "images": PATCHES | {"row_order": row_order}},
            **model,
        ).dataset
        seen = sorted(
            (sample.tokens.tolist(), sample.targets.tolist(), sample.weights.tolist(), len(sample.images))
            for sample in data._samples
        )
        assert seen == [
            ([2, 5, 1, 1, 1, 1, 6, 7, 8], [5, 1, 1, 1, 1, 6, 7, 8, 3], [0, 0, 0, 0, 0, 0, 1, 1, 1], 1),
            ([2, 5, 6], [5, 6, 3], [0, 1, 1], 0),
            ([2, 9, *[1] * 8, 10], [9, *[1] * 8, 10, 3], [1, *[0] * 8, 1, 1], 2),
        ]  # fmt: skip
        features = next(sample.features for sample in data._samples if len(sample.images) == 2)
        assert features.tolist() == [-1, -1, *range(8), -1]
    for line, words in {
        '{"text": "w5 w99"}': r"line 1 .* has 'w99', for which .* has no token|cannot be written by",
        '{"text": "w5 \\ud800"}': "line 1 .* has half a character",
        '{"text": "w5", "image": "a.png"}': "line 1 .* has a field 'image', which is not read: call it images",
        '{"text": "w5", "images": [], "Prompt": "w6"}': "line 1 .* has a field 'Prompt'",
    }.items():
        Path("seen.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=words):
            planned("seen", run="seeing", data={"kind": "image_text", "path": "seen.jsonl", **IMAGES}, **model)


def test_internvl_has_its_marks_around_an_image(work: Path) -> None:
    names = {1: "<IMG_CONTEXT>", 5: "<img>", 6: "</img>"}
    write_import(plan_import(seeing(work / "internvl", "internvl", names)), work / "seen")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(work / "a.png")
    (work / "seen.jsonl").write_text(json.dumps({"text": "w7 <image> w8", "images": ["a.png"]}) + "\n")
    model = yaml.safe_load(Path("seen/model.yaml").read_text())
    images = PATCHES | {"merge": 2, "row_order": True}
    section = {"kind": "image_text", "path": "seen.jsonl", "batch_size": 1, "num_microbatches": 1, "images": images}
    (sample,) = planned("seen", run="seeing", data=section, **model).dataset.samples(0)
    assert sample.tokens.tolist() == [2, 7, 5, 1, 6, 8]
    assert sample.features.tolist() == [-1, -1, -1, 0, -1, -1]
    assert sample.weights.tolist() == [1, 0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"row_order is True, and the data has False: give data.images row_order true"):
        planned("seen", run="seeing", data=section | {"images": images | {"row_order": False}}, **model)


@pytest.mark.slow
def test_an_imported_llava_is_trained_sampled_and_exported_with_its_own_tokens(work: Path) -> None:
    write_import(plan_import(seeing(work / "llava")), work / "seen")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(work / "a.png")
    line = {"prompt": "w5 <image> w6", "target": " w7 w8", "images": ["a.png"]}
    (work / "seen.jsonl").write_text((json.dumps(line) + "\n") * 4)
    model = yaml.safe_load(Path("seen/model.yaml").read_text())
    written(
        str(work / "seen"),
        data={"kind": "image_text", "path": str(work / "seen.jsonl"), **IMAGES},
        **model | {"optimizer": {"learning_rate": 0.05}, "pipeline": {"num_stages": 2}},
    )
    done = trained("--steps", 40)
    assert done.returncode == 0, done.stderr
    shutil.rmtree("seen")
    prompt = ("--image", work / "a.png", "--prompt", "w5 <image> w6", "--max-tokens", 8)
    told = run_command("sample", work / "run", *prompt)
    assert (told.returncode, told.stdout) == (0, "w7 w8\n"), told.stderr
    assert exported("run", "exp")["eos_token_id"] == 3
    assert Path("exp/tokenizer.json").read_bytes() == Path("llava/tokenizer.json").read_bytes()
