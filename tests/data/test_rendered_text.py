"""Drawn words: what a batch is made of, that it follows from the step alone, and that nothing unread is drawn."""

import zlib
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest

from rrfp_jax.data import RenderedText, RenderedTextConfig, pictures, prefetched
from rrfp_jax.data.drawing import ink, rows_of_ink, widths
from rrfp_jax.data.pictures import Pictures
from rrfp_jax.data.rendered_config import HEIGHT

WORDS = tuple(f"{a}{b}{c}" for a in "abWgi" for b in "oMl" for c in ("", "n", "ts", "Qq"))
PINNED = (
    b"umber 1.\naots is |\ngM|r 29.\nWMts is number 30.\nWM|\n\niMn\nil|2.\nbon is number 13.\nb|"
    b"\n\n\naMn\naM\naM|\nbl|\n\n\nblQq\nbon\naln|\nbo|\nWMQq|mber 2.\naoQq is | number "
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{word} is number {index}.\n" for index, word in enumerate(WORDS)))
    return path


@cache
def dataset(text, **changes):
    values = {"batch_size": 12, "num_microbatches": 4, "words": WORDS, "held_out": 0.2, "interleaved": False, "seed": 3}
    return RenderedText(RenderedTextConfig(path=str(text), **(values | changes)))


class Taken(NamedTuple):
    """A sample, taken out of a batch again."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    weights: tuple[float, ...]
    pictures: bytes


def samples_of(batch):
    """The samples of a batch, sorted."""
    found = []
    for number, tokens in enumerate(batch["tokens"]):
        leaf = {name: entries[number] for name, entries in batch.items()}
        for row in range(len(tokens)):
            for segment in range(1, leaf["segments"][row].max() + 1):
                at = leaf["segments"][row] == segment
                assert leaf["positions"][row][at].tolist() == list(range(at.sum()))
                index = [] if leaf["patches"] is None else leaf["image_index"][row][at]
                values = [tuple(leaf[name][row][at].tolist()) for name in ("tokens", "targets", "weights")]
                found.append(Taken(*values, pictures_at(leaf, index)))
    return sorted(found)


def pictures_at(leaf, index):
    """The patches that stand at a sample's positions, feature by feature, with their places."""
    if leaf["patches"] is None:
        return b""
    patches, rows, columns = (
        leaf[name].reshape(-1, 4, *leaf[name].shape[2:]) for name in ("patches", "patch_rows", "patch_columns")
    )
    features = [number for number in index if number >= 0]
    return b"".join(leaves[features].tobytes() for leaves in (patches, rows, columns))


def test_leaves_have_the_shapes_of_one_of_the_buckets(text):
    data = dataset(text)
    seen = set()
    for step in range(50):
        batch = data.batch(step)
        for number in range(4):
            leaves = {name: leaf[number] for name, leaf in batch.items() if leaf[number] is not None}
            shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
            [bucket] = [
                number
                for number, bucket in enumerate(data.buckets)
                if shapes == {name: (spec.shape, spec.dtype) for name, spec in bucket.items()}
            ]
            seen.add(bucket)
        for name, most in zip(("patch_rows", "patch_columns"), data.largest_grid, strict=True):
            assert max(leaf.max() for leaf in batch[name] if leaf is not None) < most
    assert len(seen) > 3
    assert any("patches" not in bucket for bucket in data.buckets)
    assert len(data.buckets) <= 3 * (3 + 1)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("balance", [True, False])
def test_every_picture_stands_where_its_sample_is(text, pack, balance):
    """The patches at a sample's image positions are those drawn for it, and only what comes after counts."""
    data = dataset(text, pack=pack, balance=balance, noise=0)
    whole = samples_of(data.batch(2))
    assert len(whole) == 12
    words = 0
    for sample in whole:
        assert sample.tokens[1:] == sample.targets[:-1]
        lines = bytes([*sample.tokens, sample.targets[-1]]).split(b"\n")
        images = [line for line in lines if line.startswith(b"\xff")]
        if not images:
            assert all(sample.weights)
            assert not sample.pictures
            continue
        transcript = b"\n".join(lines[len(images) :])
        assert sum(sample.weights) == sum(sample.weights[-len(transcript) :]) == len(transcript)
        assert sum(map(len, images)) * 4 * (64 * 4 + 8) == len(sample.pictures)
        for line in transcript.decode().split("\n")[:-1]:
            assert line in data.training_words
            words += 1
    assert words > 12


def test_pictures_are_those_of_the_words(text):
    """What stands in a microbatch, put together again from rows and columns, is the word's ink."""
    data = dataset(text, noise=0, min_contrast=1, max_shift=0, text_only=0, max_images=1, faces=("DejaVuSans",))
    batch = data.batch(0)
    found = 0
    for number, tokens in enumerate(batch["tokens"]):
        leaf = {name: entries[number] for name, entries in batch.items()}
        flat = {
            name: leaf[name].reshape(-1, *leaf[name].shape[2:]) for name in ("patches", "patch_rows", "patch_columns")
        }
        for row in range(len(tokens)):
            for segment in range(1, leaf["segments"][row].max() + 1):
                at = leaf["segments"][row] == segment
                index = leaf["image_index"][row][at]
                places = (index[index >= 0][:, None] * 4 + np.arange(4)).reshape(-1)
                columns = flat["patch_columns"][places]
                picture = np.zeros((16, 8 * (columns.max() + 1)), np.float32)
                for place, across, down in zip(places, columns, flat["patch_rows"][places], strict=True):
                    picture[8 * down : 8 * down + 8, 8 * across : 8 * across + 8] = flat["patches"][place].reshape(8, 8)
                word = bytes(tokens[row][at][index < 0].tolist()).decode().strip("\n")
                assert any(same_ink(picture, word, size) for size in data.config.font_sizes)
                found += 1
    assert found == 12


def same_ink(picture, word, size):
    mask, top = ink(word, "DejaVuSans", size)
    expected = np.zeros_like(picture)
    if 1 + mask.shape[1] > picture.shape[1]:
        return False
    expected[top : top + mask.shape[0], 1 : 1 + mask.shape[1]] = mask / np.float32(255)
    return np.allclose(picture, expected, atol=1e-6)


def test_each_picture_may_be_followed_by_its_line(text):
    data = dataset(text, interleaved=True, text_only=0)
    lines_alone = sorted(
        bytes(target for target in sample.targets if target != 0xFF) for sample in samples_of(data.batch(0))
    )
    together = dataset(text, text_only=0)
    assert lines_alone != sorted(
        bytes(target for target in sample.targets if target != 0xFF) for sample in samples_of(together.batch(0))
    )
    for tokens, targets, weights, _ in samples_of(data.batch(0)):
        lines = bytes([*tokens, targets[-1]]).split(b"\n")
        assert all(set(line) == {0xFF} for line in lines[:-1:2])
        assert all(line.decode() in data.training_words for line in lines[1::2])
        assert sum(weights) == sum(len(line) + 1 for line in lines[1::2])
    [batch] = data.held_out(32)
    for row, start in enumerate(batch.starts):
        prompt = bytes(batch.leaves["tokens"][row, :start].tolist()).split(b"\n")
        assert prompt[-1] == b""
        assert set(prompt[-2]) == {0xFF}
        assert all(line.decode() in data.held_out_words for line in prompt[1:-2:2])
        assert len(batch.words[row]) == len(batch.pictures[row]) == 1
        assert batch.words[row][0] in data.held_out_words
        assert len(prompt[-2]) * 16 == batch.pictures[row][0].shape[1]


def test_a_batch_follows_from_seed_and_step_alone(text):
    first, second = dataset(text), dataset.__wrapped__(text)
    assert [samples_of(first.batch(step)) for step in range(4)][3] == samples_of(second.batch(3))
    assert samples_of(first.batch(0)) != samples_of(first.batch(1))
    assert samples_of(first.batch(0)) != samples_of(dataset(text, seed=4).batch(0))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_microbatches": 1},
        {"num_microbatches": 12},
        {"balance": False},
        {"pack": False},
        {"length": 96, "image_length": 64},
        {"text_buckets": 1, "image_buckets": 5},
    ],
)
def test_samples_are_the_same_in_all_layouts(text, changes):
    assert samples_of(dataset(text, **changes).batch(5)) == samples_of(dataset(text).batch(5))


def test_what_is_drawn_is_the_same_for_ever(text):
    """Pinned: another stream would make resumed runs see other data. Widths are left out, since faces may change."""
    samples = [bytes(sample.tokens.tolist()).replace(b"\xff", b"") for sample in dataset(text).samples(7)]
    assert b"|".join(samples) == PINNED


def test_letters_of_other_widths_are_other_data(text, monkeypatch):
    before = dataset.__wrapped__(text).fingerprint
    assert dataset.__wrapped__(text).fingerprint == before
    monkeypatch.setattr(pictures, "widths", lambda *which: widths(*which) + 1)
    assert dataset.__wrapped__(text).fingerprint != before


def test_nothing_is_drawn_that_is_not_read(text, monkeypatch):
    data = dataset(text)
    whole = data.batch(1)
    drawn = []
    draw = Pictures.pixels
    monkeypatch.setattr(Pictures, "pixels", lambda self, *args: drawn.append(args) or draw(self, *args))
    partly = data.batch(1, {"patches": {1, 2}, "tokens": range(4)})
    pictures = [0 if leaf is None else sum(map(int, leaf.max(axis=1))) for leaf in whole["patch_segments"]]
    assert len(drawn) == pictures[1] + pictures[2] < sum(pictures)
    for number, (leaf, of_all) in enumerate(zip(partly["patches"], whole["patches"], strict=True)):
        if number in {1, 2}:
            assert np.array_equal(leaf, of_all)
        else:
            assert not isinstance(leaf, np.ndarray)
            assert (leaf is None) == (of_all is None)
            assert leaf is None or (leaf.shape, leaf.dtype) == (of_all.shape, of_all.dtype)
    data.batch(1, {})
    assert len(drawn) == pictures[1] + pictures[2]


def test_a_blind_run_differs_in_its_pixels_only(text):
    seeing, blind = dataset(text).batch(0), dataset(text, blind=True).batch(0)
    assert seeing.keys() == blind.keys()
    for name in seeing:
        for one, other in zip(seeing[name], blind[name], strict=True):
            assert (one is None) == (other is None)
            if name == "patches" and one is not None:
                assert one.any()
                assert not other.any()
            elif one is not None:
                assert np.array_equal(one, other)


def test_held_out_words_are_read_from_prompts(text):
    data = dataset(text)
    assert not {*data.held_out_words} & {*data.training_words}
    assert {*data.held_out_words} == {word for word in WORDS if zlib.crc32(word.encode()) < 0.2 * 2**32}
    batches = data.held_out(16, rows=8)
    assert len(batches) == 2
    assert len({tuple((name, leaf.shape) for name, leaf in batch.leaves.items()) for batch in batches}) == 1
    for batch in batches:
        assert all(set(words) <= {*data.held_out_words} for words in batch.words)
        for row, start in enumerate(batch.starts):
            prompt = bytes(batch.leaves["tokens"][row, :start].tolist())
            assert prompt.endswith(b"\xff\n")
            assert prompt.count(b"\n") == len(batch.words[row]) == len(batch.pictures[row])
            assert not batch.leaves["tokens"][row, start:].any()
            assert (batch.leaves["image_index"][row] >= 0).sum() == prompt.count(b"\xff")
            assert start + sum(len(word) + 1 for word in batch.words[row]) <= batch.leaves["tokens"].shape[1] + 1
        assert (batch.leaves["segments"] == 1).all()
    again = dataset.__wrapped__(text).held_out(16, rows=8)
    assert all(
        np.array_equal(one.leaves[name], other.leaves[name])
        for one, other in zip(batches, again, strict=True)
        for name in one.leaves
    )
    with pytest.raises(ValueError, match="12 samples do not divide into batches of 8: give a multiple of 8"):
        data.held_out(12, rows=8)


@pytest.mark.parametrize("face", ["DejaVuSans", "DejaVuSerif-Italic", "DejaVuSansMono-BoldOblique"])
def test_words_fit_their_pictures(face):
    """The width that is foretold holds the ink, at every size that fits the height."""
    words = ["Wij", "fjord", "AVAWA", "iiii", "Qgyp"]
    for size in (9, 12, 14):
        top, bottom = rows_of_ink(face, size)
        assert bottom - top <= HEIGHT
        for word, width in zip(words, widths(words, face, size), strict=True):
            mask, below = ink(word, face, size)
            assert mask.shape[1] <= width
            assert below >= 0
            assert below + mask.shape[0] <= bottom - top


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 10}, r"batch_size 10 does not divide into 4 microbatches: .* or batch_size 12"),
        ({"min_letters": 6}, r"max_letters is 5: give at least min_letters, 6"),
        ({"max_letters": 10**10}, r"max_letters is 10000000000: give at most 1000"),
        ({"text_only": 1.5}, r"text_only is 1\.5: give 0 to 1"),
        ({"patch_size": 12}, r"patch_size 12 x merge 2 does not divide the height of a picture, 16"),
        ({"faces": ("Comic",)}, r"there is no face 'Comic' beside matplotlib: give some of DejaVuSans,"),
        ({"faces": ()}, r"faces or font_sizes is empty"),
        ({"font_sizes": (30,)}, r"letters of DejaVuSans in size 30 are \d+ pixels high, .* give smaller font_sizes"),
        ({"font_sizes": (12, 0)}, r"font_sizes has 0: give at least 1"),
        ({"seed": 2**64}, r"seed is 18446744073709551616: give a number from 0 to 18446744073709551615"),
        ({"words": ("ab", "c d")}, r"the word 'c d' cannot be drawn"),
        ({"words": ("ab",)}, r"of 1 words 0 are held out, and 1 are left"),
        ({"length": 10}, r"length is 10, but rows must hold \d+ tokens, the longest sample: give at least that"),
        ({"image_length": 6}, r"image_length is 6: give a multiple of 4"),
        ({"image_length": 4}, r"image_length is 4, but rows must hold \d+ patches, the largest image"),
        ({"text_length": 4}, r"text_length is 4: give at least 8"),
        ({"text_length": 5000}, r"\d+ bytes of text are too few for a sample of 5000"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(text, changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(text, **changes)


def test_words_that_are_not_held_out_cannot_be_asked_for(text):
    with pytest.raises(ValueError, match=r"held_out is 0, so all words are trained on"):
        dataset(text, held_out=0.0).held_out(32)


def test_a_negative_step_is_refused(text):
    with pytest.raises(ValueError, match=r"step is -1"):
        dataset(text).batch(-1)


def test_threads_draw_the_same(text):
    data = dataset.__wrapped__(text)
    ink.cache_clear()
    with prefetched(data, num_threads=4) as batches:
        threaded = list(islice(batches, 12))
    for step, batch in enumerate(threaded):
        for one, other in zip(batch["patches"], data.batch(step)["patches"], strict=True):
            assert (one is None and other is None) or np.array_equal(one, other)
