"""What a model reads: as one token after another would be, alone and unpadded; and the picture of it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.commands.sampling.generating import Drawing, Generator, TokenPrompt
from rrfp_jax.commands.training.reading import ReadWord, read_words, scores_of
from rrfp_jax.commands.training.reading_picture import draw_reading, figure_of
from rrfp_jax.data import RenderedText, RenderedTextConfig
from rrfp_jax.data.scores import lines_of
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import AudioConfig, ProjectorConfig, VisionConfig
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.models.vision_language_config import VisionLanguageConfig
from rrfp_jax.programs.chunk import param_specs

NEWLINE = ord("\n")


@cache
def config(audio=None):
    vision = VisionConfig(
        hidden=16, num_layers=1, num_heads=2, mlp_dim=32, patch_dim=64, max_rows=2, max_columns=8, init_std=0.5
    )
    decoder = LanguageModelConfig(vocab_size=256, hidden=16, num_layers=2, num_heads=2, mlp_dim=32, init_std=0.5)
    return VisionLanguageConfig(
        vision=vision, projector=ProjectorConfig(patches_per_feature=4), decoder=decoder, audio=audio
    )


@pytest.fixture(scope="module")
def params():
    """Untrained, but one that ends a line now and then."""
    chunks = vision_language_model(config()).split(packed=True).chunks
    params = {name: layer for chunk in chunks for name, layer in chunk.init(jax.random.key(1)).items()}
    kernel = params["decoder.head"]["kernel"]
    params["decoder.head"]["kernel"] = kernel.at[:, NEWLINE].multiply(2.5)
    return params


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{a}{b}{c}" for a in "abdWi" for b in "oMl" for c in ("", "nu", "tsa")))
    data = RenderedText(
        RenderedTextConfig(
            path=str(path), batch_size=8, num_microbatches=2, max_images=3, interleaved=False, held_out=0.5, length=48
        )
    )
    return data.held_out(8, rows=4)


@jax.jit
def logits_of(params, leaves):
    graph = vision_language_model(config()).split(
        encoder_layers_per_chunk=[0, 1], decoder_layers_per_chunk=[1, 1], packed=True, gives_logits=True
    )
    x = None
    for chunk in graph.chunks:
        own = {name: params[name] for name in param_specs(chunk)}
        x = chunk.apply(own, x, {name: leaves[name] for name in chunk.leaves}, key=None)
    return x


def read_one_by_one(params, batch, row):
    """The lines of one sample, in a loop of Python: everything is computed anew for each token."""
    images = {name: leaf for name, leaf in batch.leaves.items() if name.startswith("patch")}
    alone = {name: leaf[row : row + 1] for name, leaf in batch.leaves.items() if name not in images}
    start, num_lines, length = int(batch.starts[row]), len(batch.words[row]), alone["tokens"].shape[1]
    tokens = batch.leaves["tokens"][row, :start].tolist()
    while tokens[start:].count(NEWLINE) < num_lines and len(tokens) < length:
        alone["tokens"] = np.array([tokens + [0] * (length - len(tokens))], np.int32)
        logits = logits_of(params, alone | images)
        assert logits.shape == (1, length, 256)
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
    return lines_of(np.array(tokens[start:]), num_lines)


@pytest.mark.slow
def test_words_are_read_as_token_by_token_alone(params, batches):
    read = read_words(config(), params, batches)
    assert [word.written for word in read] == [word for batch in batches for words in batch.words for word in words]
    alone = [line for batch in batches for row in range(4) for line in read_one_by_one(params, batch, row)]
    assert [word.read for word in read] == alone
    assert len(set(alone)) > 4
    assert any(0 < len(line) < 8 for line in alone)


def test_every_word_has_its_picture(params, batches):
    read = read_words(config(), params, batches)
    pictures = [picture for batch in batches for of_sample in batch.pictures for picture in of_sample]
    assert len(pictures) == len(read)
    assert all(np.array_equal(word.picture, picture) for word, picture in zip(read, pictures, strict=True))


def test_what_a_model_reads_depends_on_the_picture(params, batches):
    """One that saw nothing would read the same in all pictures of a size."""
    [batch] = batches[:1]
    blank = {**batch.leaves, "patches": np.zeros_like(batch.leaves["patches"])}
    seen = read_words(config(), params, [batch])
    unseen = read_words(config(), params, [type(batch)(blank, batch.starts, batch.words, batch.pictures)])
    assert [word.read for word in seen] != [word.read for word in unseen]


def test_parameters_may_lie_on_several_devices_and_all_are_needed(params, batches):
    devices = jax.devices()
    scattered = {
        name: jax.device_put(layer, devices[number % len(devices)])
        for number, (name, layer) in enumerate(params.items())
    }
    assert [word.read for word in read_words(config(), scattered, batches[:1])] == [
        word.read for word in read_words(config(), params, batches[:1])
    ]
    del scattered["decoder.head"], scattered["projector"]
    with pytest.raises(ValueError, match=r"parameters of projector, decoder\.head are missing: gather those of all"):
        read_words(config(), scattered, batches)


def test_a_model_that_listens_is_refused(params, batches):
    audio = AudioConfig(hidden=16, num_layers=1, num_heads=2, mlp_dim=32, bins=4)
    with pytest.raises(ValueError, match="give one without audio"):
        read_words(config(audio), params, batches)


def words(*pairs):
    return [ReadWord(np.full((16, 16 * len(written)), 0.5, np.float32), written, read) for written, read in pairs]


def test_scores():
    scores = scores_of(words(("ab", "ab"), ("abcd", "abxd"), ("ef", "")))
    assert scores == (3, 1 / 3, 3 / 8)
    with pytest.raises(ValueError, match="give at least one word"):
        scores_of([])


def test_the_picture_says_what_is_read_and_what_is_wrong(tmp_path):
    shown = words(("ab", "ab"), ("$a$", "\x02b"), ("cd", ""), *[("e", "e")] * 5)
    texts = [text.get_text() for text in figure_of(shown, "Some words").texts]
    assert texts[:6] == ["Some words", "ab", "\ufffdb", "not: $a$", "(nothing)", "not: cd"]
    assert len(figure_of(shown, "").axes) == 8
    path, again = tmp_path / "folder" / "reading.png", tmp_path / "again.png"
    draw_reading(shown, path, title="Some words")
    draw_reading(shown, again, title="Some words")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.read_bytes() == again.read_bytes()


def test_pictures_that_cannot_be_drawn_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"end in \.png"):
        draw_reading(words(("a", "a")), tmp_path / "reading.gif", title="")
    with pytest.raises(ValueError, match="give at least one"):
        draw_reading([], tmp_path / "reading.png", title="")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sampling_from_a_cache_reads_the_same(params, batches):
    generator = Generator(config(), params)
    expected = read_words(config(), params, batches)
    found = []
    for batch in batches:
        for row, (start, words) in enumerate(zip(batch.starts, batch.words, strict=True)):
            leaves = {name: batch.leaves[name] for name in vision_language_model(config()).split().chunks[0].leaves}
            leaves["image_index"] = batch.leaves["image_index"][row : row + 1, :start]
            prompt = TokenPrompt(tokens=batch.leaves["tokens"][row, :start], image_leaves=leaves)
            made = generator.tokens(prompt, Drawing(max_tokens=batch.leaves["tokens"].shape[1] - int(start)))
            found += lines_of(made, len(words))
    assert found == [word.read for word in expected]
    assert len({word.read for word in expected}) > 1
