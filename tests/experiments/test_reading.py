"""The demonstration: samples that are drawn, words that are read as whole forwards say, scores, and their picture."""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from experiments.reading import __main__ as reading
from experiments.reading.draw import BLIND, HEIGHT, HELD_OUT, PROMPT, TRAIN, draw_data, draw_word
from experiments.reading.scores import ReadWord, draw_reading, edit_distance, figure_of, read_words, scores_of
from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.main import main
from rrfp_jax.commands.sampling.prompts import prompt_with_images
from rrfp_jax.data import ImageText, ImageTextConfig
from rrfp_jax.models import AudioConfig, LanguageModelConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.programs.chunk import param_specs

NEWLINE = ord("\n")
TEXT = " ".join(f"{a}{b}{c}" for a in "abdWi" for b in "oMl" for c in ("", "nu", "tsa")) + " and, last_of_all: <image>"
GREY: dict[str, Any] = {"channels": 1, "patch_size": 8, "mean": (1.0,), "std": (1.0,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words")
    draw_data(path, num_samples=100, num_pictures=40, num_held_out=6, held_out=0.5, text=TEXT)
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_show_words_and_pieces_of_the_text(folder: Path) -> None:
    lines = lines_of(folder / TRAIN)
    assert {len(line["images"]) for line in lines} == {0, 1, 2, 3, 4}
    assert 10 < sum(not line["images"] for line in lines) < 40
    for line in lines:
        if not line["images"]:
            assert line["text"] in TEXT
            assert 6 <= len(line["text"]) <= 24
            continue
        words = line["text"].split("\n")[1::2]
        assert line["text"] == "".join(f"{PROMPT}{word}\n" for word in words)
        assert len(words) == len(line["images"])
        assert all(word in TEXT for word in words)
    data = ImageText(ImageTextConfig(path=str(folder / TRAIN), batch_size=4, num_microbatches=2, **GREY))
    assert (data.num_samples, data.largest_grid) == (100, (2, 6))


def test_held_out_words_are_in_no_sample(folder: Path) -> None:
    held = [line["target"].strip() for line in lines_of(folder / HELD_OUT)]
    assert len(held) == 6
    assert all(zlib.crc32(word.encode()) < 0.5 * 2**32 for word in held)
    shown = {word for line in lines_of(folder / TRAIN) if line["images"] for word in line["text"].split("\n")[1::2]}
    assert not shown & {*held}
    assert all(line["prompt"] == PROMPT for line in lines_of(folder / HELD_OUT))


def test_a_blind_data_set_differs_in_its_pixels_only(folder: Path) -> None:
    for name in (TRAIN, HELD_OUT):
        seeing, blind = lines_of(folder / name), lines_of(folder / BLIND / name)
        for one, other in zip(seeing, blind, strict=True):
            assert {**one, "images": []} == {**other, "images": []}
            for picture, blank in zip(one["images"], other["images"], strict=True):
                with Image.open(folder / picture) as drawn, Image.open(folder / BLIND / blank) as empty:
                    assert drawn.size == empty.size
                    assert len({*empty.tobytes()}) == 1 < len({*drawn.tobytes()})


def test_the_same_arguments_give_the_same_samples(folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_samples": 100, "num_pictures": 40, "num_held_out": 6, "held_out": 0.5, "text": TEXT}
    draw_data(tmp_path, **values)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert all((folder / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)
    draw_data(tmp_path, **values, seed=1)
    assert (folder / TRAIN).read_bytes() != (tmp_path / TRAIN).read_bytes()


@pytest.mark.parametrize("word", ["ab", "Wij", "fjord", "iiii", "Qgypj"])
def test_words_fit_their_pictures(word: str) -> None:
    """Dark pixels keep off the left and right edges, whatever is drawn."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        picture = draw_word(word, rng)
        assert picture.dtype == np.uint8
        assert picture.shape[0] == HEIGHT
        assert picture.shape[1] % HEIGHT == 0
        assert picture.shape[1] >= 8 * len(word) + 2
        assert (picture < 150).sum() > 4 * len(word)
        assert (picture[:, [0, -1]] > 150).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "samples is 0: give at least 1"),
        ({"num_pictures": 0}, "pictures is 0: give at least 1"),
        ({"seed": -1}, "seed is -1: give at least 0"),
        ({"text": "1 2 3 " * 9}, r"the text has 54 characters and 0 words, .* give a longer text"),
        ({"text": "ab"}, r"the text has 2 characters and 1 words, of which 0 are held out"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"num_samples": 4, "num_pictures": 4, "text": TEXT}
    with pytest.raises(ValueError, match=message):
        draw_data(tmp_path, **(values | changes))
    assert not [*tmp_path.iterdir()]


@cache
def config(audio: AudioConfig | None = None) -> VisionLanguageConfig:
    shape: dict[str, Any] = {"hidden": 16, "num_heads": 2, "mlp_dim": 32, "init_std": 0.5}
    return VisionLanguageConfig(
        vision=VisionConfig(num_layers=1, patch_dim=64, max_rows=2, max_columns=8, **shape),
        projector=ProjectorConfig(patches_per_feature=4),
        decoder=LanguageModelConfig(vocab_size=256, num_layers=2, **shape),
        audio=audio,
    )


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    """Untrained, but of a model that ends a line now and then."""
    chunks = vision_language_model(config()).split(packed=True).chunks
    params = {name: layer for chunk in chunks for name, layer in chunk.init(jax.random.key(1)).items()}
    kernel = params["decoder.head"]["kernel"]
    params["decoder.head"]["kernel"] = kernel.at[:, NEWLINE].multiply(2.5)
    return params


@jax.jit
def logits_of(params: Any, leaves: Any) -> Any:
    graph = vision_language_model(config()).split(
        encoder_layers_per_chunk=[0, 1], decoder_layers_per_chunk=[1, 1], packed=True, gives_logits=True
    )
    x = None
    for chunk in graph.chunks:
        own = {name: params[name] for name in param_specs(chunk)}
        x = chunk.apply(own, x, {name: leaves[name] for name in chunk.leaves}, key=None)
    return x


def read_by_forwards(params: Any, file: Path, data: ImageTextConfig) -> str:
    """The line of one picture, in a loop of Python: everything is computed anew for each token."""
    prompt = prompt_with_images(PROMPT, [file], data, config())
    tokens, start, length = prompt.tokens.tolist(), len(prompt.tokens), len(prompt.tokens) + 16
    index = np.full((1, length), -1, np.int32)
    index[:, :start] = prompt.image_leaves["image_index"]
    leaves = {**prompt.image_leaves, "image_index": index, "segments": np.ones((1, length), np.int32)}
    leaves["positions"] = np.arange(length, dtype=np.int32)[None]
    while len(tokens) < length and tokens[-1:] != [NEWLINE] * (len(tokens) > start):
        leaves["tokens"] = np.array([tokens + [0] * (length - len(tokens))], np.int32)
        tokens.append(int(jnp.argmax(logits_of(params, leaves)[0, len(tokens) - 1])))
    return bytes(tokens[start:]).decode("latin-1").removesuffix("\n")


@pytest.mark.slow
def test_words_are_read_as_whole_forwards_say(folder: Path, params: Any) -> None:
    data = ImageTextConfig(path=str(folder / TRAIN), batch_size=4, num_microbatches=2, **GREY)
    read = read_words(config(), params, data, folder / HELD_OUT, 6)
    lines = lines_of(folder / HELD_OUT)
    files = [folder / name for line in lines for name in line["images"]]
    assert [word.written for word in read] == [line["target"].strip() for line in lines]
    assert [word.read for word in read] == [read_by_forwards(params, file, data) for file in files]
    assert len({word.read for word in read}) > 1
    for word, file in zip(read, files, strict=True):
        with Image.open(file) as picture:
            assert np.array_equal(word.picture, np.asarray(picture))
    # A model that saw nothing would read the same in all pictures of a size.
    blind = read_words(config(), params, data, folder / BLIND / HELD_OUT, 6)
    assert [word.read for word in read] != [word.read for word in blind]


def test_a_model_that_listens_is_refused(folder: Path, params: Any) -> None:
    audio = AudioConfig(hidden=16, num_layers=1, num_heads=2, mlp_dim=32, bins=4)
    data = ImageTextConfig(path=str(folder / TRAIN), batch_size=4, num_microbatches=2, **GREY)
    with pytest.raises(ValueError, match="give one without audio"):
        read_words(config(audio), params, data, folder / HELD_OUT, 1)
    with pytest.raises(ValueError, match=r"cannot read .*gone\.jsonl \(No such file or directory\): give a run that"):
        read_words(config(), params, data, folder / "gone.jsonl", 1)


def test_reading_refuses_what_is_no_run_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: reading.main([str(word) for word in words]))
        assert ended.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "config.yaml").write_text(Path("tpu_gpu_configs/cpu/multimodal.yaml").read_text())
    assert "holds no checkpoint: train first" in refused(tmp_path)
    assert "samples is 0: give at least 1" in refused(tmp_path, "--samples", 0)
    assert "is no run directory, it has no config.yaml" in refused(tmp_path / "elsewhere")
    assert "let the name end in .png" in refused(tmp_path, "--picture", "words.jpg")
    (tmp_path / "config.yaml").write_text(Path("tpu_gpu_configs/cpu/debug.yaml").read_text())
    assert "was not trained to read pictures" in refused(tmp_path)


WORD = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("read", "written", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_known_distances(read, written, distance):
    assert edit_distance(read, written) == distance


@given(WORD, WORD, WORD)
def test_it_is_a_distance(one, two, three):
    assert edit_distance(one, two) == edit_distance(two, one) <= max(len(one), len(two))
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert abs(len(one) - len(two)) <= edit_distance(one, two)


@given(WORD, st.integers(0, 6), st.sampled_from("abcx"))
def test_one_edit_is_one_edit(word, at, letter):
    assert edit_distance(word, word[:at] + letter + word[at:]) == 1
    if at < len(word):
        assert edit_distance(word, word[:at] + word[at + 1 :]) == 1


def test_the_command_of_old_is_refused_with_the_one_that_took_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rrfp", "read", "runs/reading"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    answer = "'read' is no command any more: give python -m experiments.reading in the checkout"
    assert capsys.readouterr().err == f"error: {answer}\n"


def words(*pairs: tuple[str, str]) -> list[ReadWord]:
    return [ReadWord(np.full((16, 16 * len(written)), 90, np.uint8), written, read) for written, read in pairs]


def test_scores_are_over_all_words_together() -> None:
    assert scores_of(words(("ab", "ab"), ("abcd", "abxd"), ("ef", ""))) == (3, 1 / 3, 3 / 8)
    assert scores_of(words(("a", "abcd"))).character_error_rate == 3
    with pytest.raises(ValueError, match="give at least one word"):
        scores_of([])


def test_the_picture_says_what_is_read_and_what_is_wrong(tmp_path: Path) -> None:
    shown = words(("ab", "ab"), ("$a$", "\x02b"), ("cd", ""), *[("e", "e")] * 5)
    texts = [text.get_text() for text in figure_of(shown, "Some words").texts]
    assert texts[:6] == ["Some words", "ab", "\ufffdb", "not: $a$", "(nothing)", "not: cd"]
    assert len(figure_of(shown, "").axes) == 8
    path, again = tmp_path / "folder" / "reading.png", tmp_path / "again.png"
    draw_reading(shown, path, title="Some words")
    draw_reading(shown, again, title="Some words")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.read_bytes() == again.read_bytes()


def test_pictures_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end in \.png"):
        draw_reading(words(("a", "a")), tmp_path / "reading.gif", title="")
    with pytest.raises(ValueError, match="give at least one"):
        draw_reading([], tmp_path / "reading.png", title="")
    assert not list(tmp_path.iterdir())
