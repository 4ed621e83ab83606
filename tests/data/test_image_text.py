"""Text with images from files: what becomes of a line, what is refused, and that only what is read is decoded."""

import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from rrfp_jax.data import BrokenData, ImageText, ImageTextConfig, contents_of, image_text, prefetched
from rrfp_jax.data.images import fitting_grid, size_of_image


def gradient(width, height):
    """An image in which every place is told by its colour."""
    rows, columns = np.meshgrid(np.linspace(0, 255, height), np.linspace(0, 255, width), indexing="ij")
    return Image.fromarray(np.stack([rows, columns, 255 - rows], axis=-1).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    for name, size in {"wide.png": (96, 16), "small.png": (16, 16), "tall.png": (32, 64)}.items():
        gradient(*size).save(tmp_path / name)
    lines = [
        {"prompt": "What? <image>\n", "target": "wide", "images": ["wide.png"]},
        {"prompt": "", "target": "two", "images": ["small.png", "tall.png"]},
        {"text": "no image at all, but a rather long text"},
        {"text": "a", "images": []},
        {"text": "<image> and <image> and <image>!", "images": ["small.png", "small.png", "wide.png"]},
        {"prompt": "Why?", "target": "So."},
    ]
    write(tmp_path, lines)
    return tmp_path


def write(folder, lines):
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def dataset(folder, **changes):
    values = {"batch_size": 6, "num_microbatches": 3, "patch_size": 8, "merge": 2, "max_patches": 16}
    return ImageText(ImageTextConfig(path=str(folder / "data.jsonl"), **(values | changes)))


def read(batch):
    """Of every sample: its text with # for features, what counts, and the (rows, columns) of its images in order."""
    found = []
    for number, tokens in enumerate(batch["tokens"]):
        leaf = {name: entries[number] for name, entries in batch.items()}
        for row in range(len(tokens)):
            for segment in range(1, leaf["segments"][row].max() + 1):
                at = leaf["segments"][row] == segment
                text = bytes(tokens[row][at].tolist()).replace(b"\xff", b"#").decode()
                targets = leaf["targets"][row][at][leaf["weights"][row][at] > 0]
                found.append((text, bytes(targets.tolist()).decode(), sizes_at(leaf, row, at)))
    return sorted(found)


def sizes_at(leaf, row, at):
    if leaf["patches"] is None:
        return []
    index = leaf["image_index"][row][at]
    if index.max() < 0:
        return []
    places = (index[index >= 0][:, None] * 4 + np.arange(4)).reshape(-1)
    segments, rows, columns = (
        leaf[name].reshape(-1)[places] for name in ("patch_segments", "patch_rows", "patch_columns")
    )
    starts = [n for n in range(len(places)) if rows[n] == columns[n] == 0]
    sizes = []
    for start, stop in zip(starts, [*starts[1:], len(places)], strict=True):
        assert len(set(segments[start:stop].tolist())) == 1
        sizes.append((int(rows[start:stop].max()) + 1, int(columns[start:stop].max()) + 1))
    return sizes


EXPECTED = sorted(
    [
        ("What? ####\nwide", "wide\0", [(2, 8)]),
        ("#####two", "two\0", [(2, 2), (4, 4)]),
        ("no image at all, but a rather long text", "o image at all, but a rather long text\0", []),
        ("a", "\0", []),
        ("# and # and ####!", " and  and !\0", [(2, 2), (2, 2), (2, 8)]),
        ("Why?So.", "So.\0", []),
    ]
)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("balance", [True, False])
def test_every_line_becomes_its_sample(folder, pack, balance):
    """tall.png has 4 x 8 patches, 96 x 16 pixels have 2 x 12: both are made to fit 16."""
    data = dataset(folder, pack=pack, balance=balance)
    assert (data.num_samples, data.num_images) == (6, 6)
    expected = [
        (text, targets, [(4, 2) if size == (4, 4) else size for size in sizes]) for text, targets, sizes in EXPECTED
    ]
    for step in range(5):
        assert read(data.batch(step)) == sorted(
            (text.replace("#####two", "###two"), targets, sizes) for text, targets, sizes in expected
        )


def test_pixels_are_those_of_the_file(folder):
    data = dataset(folder, max_patches=64, num_microbatches=1, batch_size=1, mean=(0.0,), std=(1.0,))
    for step in range(6):
        batch = data.batch(step)
        if batch["patches"][0] is None:
            continue
        [_, _, sizes] = read(batch)[0]
        leaf = {name: entries[0] for name, entries in batch.items()}
        row, segment = np.argwhere(leaf["patch_segments"] == 1)[0][0], 1
        at = leaf["patch_segments"][row] == segment
        height, width = leaf["patch_rows"][row][at].max() + 1, leaf["patch_columns"][row][at].max() + 1
        picture = np.zeros((height * 8, width * 8, 3), np.uint8)
        places = zip(leaf["patches"][row][at], leaf["patch_rows"][row][at], leaf["patch_columns"][row][at], strict=True)
        for patch, down, across in places:
            picture[8 * down : 8 * down + 8, 8 * across : 8 * across + 8] = patch.reshape(3, 8, 8).transpose(1, 2, 0)
        assert (height, width) in sizes
        assert leaf["patches"].dtype == np.uint8  # in which they take a quarter of what they would as float32
        assert np.array_equal(picture, np.asarray(gradient(width * 8, height * 8)))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_microbatches": 1},
        {"num_microbatches": 6},
        {"balance": False},
        {"pack": False},
        {"length": 96, "image_length": 64},
        {"text_buckets": 1, "image_buckets": 5},
    ],
    ids=str,
)
def test_samples_are_the_same_in_all_layouts(folder, changes):
    assert read(dataset(folder, **changes).batch(5)) == read(dataset(folder).batch(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 10}, r"length 10: give at least that, or shorten the line"),
        ({"image_length": 18}, r"image_length is 18: give a multiple of 4"),
    ],
)
def test_rows_that_are_too_short_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(folder, **changes)


def test_leaves_have_the_shapes_of_one_of_the_buckets(folder):
    data = dataset(folder)
    seen = set()
    for step in range(50):
        batch = data.batch(step)
        for number in range(3):
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
    assert len(seen) > 1
    assert len(data.buckets) <= 3 * (3 + 1)


def test_threads_read_the_same(folder):
    data = dataset(folder)
    with prefetched(data, num_threads=4) as batches:
        threaded = list(islice(batches, 12))
    for step, batch in enumerate(threaded):
        for one, other in zip(batch["patches"], data.batch(step)["patches"], strict=True):
            assert (one is None and other is None) or np.array_equal(one, other)


def test_a_negative_step_is_refused(folder):
    with pytest.raises(ValueError, match=r"step is -1"):
        dataset(folder).batch(-1)


def test_images_of_one_size_have_a_row_each(folder):
    data = dataset(folder, image_size=32, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28))
    batch = data.batch(0)
    assert {"patch_rows", "patch_columns"} & batch.keys() == set()
    images = [leaf for leaf in batch["patches"] if leaf is not None]
    assert all(leaf.shape[1:] == (16, 192) for leaf in images)
    contents = contents_of(batch)
    assert (contents.images, contents.patches) == (6, 96)
    of_text = [text for text, _, _ in (sample for sample in read_texts(batch))]
    assert sorted(text.count("#") for text in of_text) == [0, 0, 0, 4, 8, 12]


def test_patches_may_come_row_by_row(folder):
    blocks, rows = (dataset(folder, image_size=32, row_order=row_order) for row_order in (False, True))
    assert blocks.largest_grid == (4, 4)
    for one, other in zip(blocks.batch(0)["patches"], rows.batch(0)["patches"], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            squares = other.reshape(-1, 2, 2, 2, 2, 192).transpose(0, 1, 3, 2, 4, 5)
            assert np.array_equal(squares.reshape(one.shape), one)


def read_texts(batch):
    return [
        (bytes(tokens[row][segments[row] == segment].tolist()).replace(b"\xff", b"#").decode(), row, segment)
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
        for row in range(len(tokens))
        for segment in range(1, segments[row].max() + 1)
    ]


def test_only_what_is_read_is_decoded(folder, monkeypatch):
    data, decoded = dataset(folder), []
    decode = image_text.read_bytes
    monkeypatch.setattr(
        image_text,
        "read_bytes",
        lambda path, *args, **named: decoded.append(path.name) or decode(path, *args, **named),
    )
    for step in range(3):
        whole = data.batch(step)
        decoded.clear()
        data.batch(step, {"tokens": range(3)})
        assert not decoded
        for number in range(3):
            decoded.clear()
            data.batch(step, {"patches": [number]})
            leaf = whole["patch_segments"][number]
            assert len(decoded) == (0 if leaf is None else leaf.max(axis=1).sum())


def test_text_alone_comes_in_few_lengths(tmp_path):
    generator = np.random.default_rng(0)
    write(tmp_path, [{"text": "x" * int(length)} for length in generator.lognormal(4, 0.6, 200)])
    data = dataset(tmp_path, batch_size=16, num_microbatches=16, pack=False, text_buckets=4)
    assert 1 < len(data.buckets) <= 4
    assert all(bucket.keys() == {"tokens", "positions", "segments", "targets", "weights"} for bucket in data.buckets)
    one = dataset(tmp_path, batch_size=16, num_microbatches=16, pack=False, text_buckets=1)
    batches = [[each.batch(step) for step in range(12)] for each in (data, one)]
    padding = [np.mean([contents_of(batch).token_padding for batch in of_one]) for of_one in batches]
    assert padding[0] < 0.25
    assert padding[1] > 0.6
    texts = [sorted(text for batch in of_one for text, _, _ in read_texts(batch)) for of_one in batches]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("balance", [True, False])
def test_every_microbatch_of_every_epoch_is_in_a_bucket(tmp_path, pack, balance):
    """Also where a step spans two epochs and has the longest sample twice."""
    write(tmp_path, [{"text": "x" * length} for length in (400, 3, 5, 4, 90, 6, 7)])
    data = dataset(tmp_path, batch_size=4, num_microbatches=2, pack=pack, balance=balance)
    shapes = [bucket["tokens"].shape for bucket in data.buckets]
    for step in range(300):
        assert all(leaf.shape in shapes for leaf in data.batch(step)["tokens"])


def test_a_broken_file_is_named_before_anything_runs(folder):
    (folder / "small.png").write_bytes(b"this is no image")
    with pytest.raises(
        ValueError, match=r"^image .*small\.png, of line 2 of .*data\.jsonl, cannot be opened as an image"
    ):
        dataset(folder)
    (folder / "small.png").unlink()
    with pytest.raises(ValueError, match=r"small\.png, of line 2 .* \(No such file or directory\): mend or remove it"):
        dataset(folder)


def test_a_pipe_or_device_among_images_is_not_waited_for(folder):
    (folder / "small.png").unlink()
    os.mkfifo(folder / "small.png")
    with pytest.raises(ValueError, match=r"small\.png, of line 2 .* \(it is no file\): mend or remove it"):
        dataset(folder)
    (folder / "small.png").unlink()
    (folder / "small.png").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"small\.png, of line 2 .* \(it is no file\): mend or remove it"):
        dataset(folder)


def test_threads_that_read_images_leave_the_filters_of_warnings_as_they_are(folder):
    """Two that save and restore them in turn leave one more behind."""
    filters = warnings.filters[:]
    opened, met = Image.open, threading.Barrier(2, timeout=5)

    def open_together(*arguments, **options):
        with suppress(threading.BrokenBarrierError):
            met.wait()
        return opened(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(2) as executor:
        patched.setattr(Image, "open", open_together)
        for _ in range(4):
            sizes = executor.map(lambda name: size_of_image(folder / name, 10**6), ["small.png", "tall.png"])
            assert len(list(sizes)) == 2
    assert warnings.filters == filters


def test_a_file_that_breaks_off_is_named_when_it_is_read(folder):
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(folder / "small.png")
    content = (folder / "small.png").read_bytes()
    (folder / "small.png").write_bytes(content[: len(content) // 2])
    data = dataset(folder)
    with pytest.raises(
        BrokenData, match=r"^image .*small\.png, of line \d of .*data\.jsonl, cannot be decoded \(.+\)"
    ) as caught:
        data.batch(0)
    data.batch(0, reads={})
    left_out = {caught.value.sample}
    batch = None
    while batch is None:
        try:
            batch = data.batch(0, None, left_out)
        except BrokenData as error:  # other samples have the same image
            left_out.add(error.sample)
    counted = [sample.weights.sum() for number, sample in enumerate(data.samples(0)) if number not in left_out]
    assert sum(weights.sum() for weights in batch["weights"]) == sum(counted)


def test_lines_that_cannot_be_read_are_left_out_as_far_as_they_may(folder, caplog):
    whole = dataset(folder, batch_size=1, num_microbatches=1).num_samples
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"text": "torn\n{"text": "no such", "images": ["none.png"]}\n')
    with pytest.raises(ValueError, match="is not JSON"):
        dataset(folder, batch_size=1, num_microbatches=1)
    with pytest.raises(ValueError, match=r"none\.png"):
        dataset(folder, batch_size=1, num_microbatches=1, max_bad_samples=1)
    assert dataset(folder, batch_size=1, num_microbatches=1, max_bad_samples=2).num_samples == whole
    assert caplog.text.count("left out: ") == 3


def test_an_image_that_is_too_large_is_named(folder):
    with pytest.raises(ValueError, match=r"tall\.png, of line 2 .* is larger than max_pixels, 2000 \(32 x 64 pixels\)"):
        dataset(folder, max_pixels=2000)


def test_a_photograph_is_turned_as_it_is_to_be_seen(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient(64, 16).save(folder / "photo.jpg", exif=exif)
    write(folder, [{"text": "a", "images": ["photo.jpg"]}])
    [sample] = dataset(folder, batch_size=1, num_microbatches=1).samples(0)
    assert sample.images == ((8, 2),)


@pytest.mark.parametrize("name", ["grey.png", "grey.pgm", "grey.tiff"])
def test_grey_of_16_bits_keeps_its_shades(folder, name):
    shades = np.arange(256, dtype=np.uint16).repeat(16 * 4).reshape(256, 64).T[:, ::4] * 257
    Image.fromarray(shades).save(folder / name)
    write(folder, [{"text": "a", "images": [name]}])
    config = {"batch_size": 1, "num_microbatches": 1, "channels": 1, "mean": (0.0,), "std": (1.0,)}
    leaf = dataset(folder, **config).batch(0)["patches"][0]
    pixels = leaf[0, :, :].reshape(-1) / 255
    assert (pixels.min(), pixels.max()) == pytest.approx((0, 1), abs=0.05)
    assert pixels.mean() == pytest.approx(0.5, abs=0.02)


def test_pixels_of_an_unknown_range_are_refused(folder):
    Image.fromarray(np.zeros((16, 16), np.float32)).save(folder / "depth.tiff")
    write(folder, [{"text": "a", "images": ["depth.tiff"]}])
    with pytest.raises(
        ValueError, match=r"depth\.tiff, of line 1 .* \(pixels of 32 bits, mode F, whose range is not known"
    ):
        dataset(folder, batch_size=1, num_microbatches=1)


def test_other_sizes_of_images_are_other_data(folder):
    before = dataset(folder).fingerprint
    gradient(32, 32).save(folder / "small.png")
    assert dataset(folder).fingerprint != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of .*data\.jsonl is not JSON \(.*\): mend or remove it"),
        ("[" * 100_000, r"line 2 of .*data\.jsonl is not JSON \(.*\): mend or remove it"),
        (
            "[]",
            r"line 2 .* must be an object with text, or with prompt and target, or with messages, and perhaps images",
        ),
        ('{"prompt": "a"}', r"line 2 .* must be an object with text, or with prompt and target"),
        ('{"text": 3}', r"line 2 .* must hold text in its fields"),
        ('{"text": "a", "image": ["a.png"]}', r"line 2 .* has a field 'image', which is not read: call it images"),
        ('{"text": "a", "Target": "b"}', r"line 2 .* has a field 'Target', which is not read: call it target"),
        ('{"text": "a\\ud800"}', r"line 2 .* has half a character \(a lone surrogate\): mend or remove it"),
        ('{"text": "a", "images": "a.png"}', r"line 2 .* and a list of paths in images"),
        ('{"text": "<image> <image>", "images": []}', r"line 2 .* has 0 images and 2 times <image>: make them equal"),
        ('{"prompt": "a", "target": ""}', r"line 2 .* has no text to predict"),
        (
            '{"prompt": "a", "target": "\\ud800"}',
            r"line 2 .* has half a character \(a lone surrogate\): mend or remove it",
        ),
        ('{"text": "' + "y" * 70 + '"}', r"line 2 .* is 70 tokens long, more than length 64: give at least that"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path, batch_size=1, num_microbatches=1, length=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 9}, r"holds 6 samples, fewer than batch_size 9"),
        ({"image_length": 12}, r"line 1 .* is 16 patches large in one of its images, more than image_length 12"),
        ({"image_size": 20}, r"image_size is 20: give a multiple of 16, patch_size x merge, for example 32"),
        (
            {"image_size": 32, "image_length": 32},
            r"images of one size have a row each, of 16 patches: give 16, or leave",
        ),
        ({"max_patches": 3}, r"max_patches is 3: give at least 4, one feature"),
        ({"row_order": True}, r"row_order is for images of one size: give image_size"),
        (
            {"max_pixels": 10**9},
            "max_pixels is 1000000000, and small files may fill the memory: give at most 178956",
        ),
        (
            {"image_folder": "~nobody-has-this-name"},
            r"~nobody-has-this-name begins with a ~ that names nobody's folder",
        ),
        ({"channels": 4}, r"channels is 4: give 3 for colours or 1 for grey"),
        ({"mean": (0.1, 0.2)}, r"mean has 2 numbers: give 1, or 3"),
        ({"std": (0.0,)}, r"std is 0\.0: give positive numbers"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(folder, **changes)


def test_an_image_that_is_a_link_out_of_the_folder_is_refused(folder):
    (folder.parent / "elsewhere.png").write_bytes((folder / "small.png").read_bytes())
    write(folder, [{"text": "a", "images": ["link.png"]}, {"text": "b", "images": ["inside.png"]}])
    (folder / "inside.png").symlink_to("small.png")
    (folder / "link.png").symlink_to("../elsewhere.png")
    with pytest.raises(
        ValueError, match=r"line 1 .* names an image outside: .*link\.png is a link to .*elsewhere\.png"
    ):
        dataset(folder, batch_size=1, num_microbatches=1)
    write(folder, [{"text": "a", "images": [str(folder.parent / "elsewhere.png")]}])  # a path is what its author means
    assert dataset(folder, batch_size=1, num_microbatches=1).num_images == 1


def test_other_fields_are_left_alone_and_no_images_are_none(folder):
    write(folder, [{"id": 7, "text": "a", "images": None, "source": {"a": 1}}, {"prompt": "b", "target": "c", "n": 0}])
    data = dataset(folder, batch_size=2, num_microbatches=1)
    assert sorted(bytes(sample.tokens.tolist()) for sample in data.samples(0)) == [b"a", b"bc"]
    assert data.num_images == 0


def coloured(folder, num):
    """So many lines, of which each two show the same image, and every fifth one none."""
    gradient(16, 16).save(folder / "0.png")
    for number in range(1, num // 2):
        (folder / f"{number}.png").write_bytes((folder / "0.png").read_bytes())
    lines = [{"prompt": "what? ", "target": f"{n}", "images": [f"{n // 2}.png"]} for n in range(num)]
    lines[::5] = [{"text": f"no image {n}"} for n in range(0, num, 5)]
    write(folder, lines)


def texts_of(data, num_steps):
    return {text for step in range(num_steps) for text, _, _ in read(data.batch(step))}


def test_samples_of_the_same_images_are_held_out_together_or_not_at_all(tmp_path):
    coloured(tmp_path, 120)
    values = {"batch_size": 4, "num_microbatches": 2, "held_out": 0.3}
    whole, kept = dataset(tmp_path, **values | {"held_out": 0.0}), dataset(tmp_path, **values)
    path = str(tmp_path / "data.jsonl")
    held = ImageText(ImageTextConfig(path=path, patch_size=8, max_patches=16, **values), part="held_out")
    assert kept.num_samples + held.num_samples == whole.num_samples == 120
    assert kept.num_images + held.num_images == whole.num_images
    assert 20 < held.num_samples < 52
    trained, asked = texts_of(kept, kept.num_samples), texts_of(held, held.num_samples)
    assert trained.isdisjoint(asked)
    assert len(trained) + len(asked) == 120
    for number in range(0, 120, 2):
        pair = {f"#what? {number}", f"#what? {number + 1}"}
        assert not (pair & trained and pair & asked)
    assert any(text.startswith("no image") for text in asked)
    assert len({data.fingerprint for data in (whole, kept, held)}) == 3
    # what a sample is kept for does not depend on the others
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[60:]) + "\n")
    assert texts_of(dataset(tmp_path, **values), 60) <= trained


def test_samples_that_share_some_images_are_held_out_together(tmp_path):
    """Chains of three: two images each, one of them that of the next."""
    coloured(tmp_path, 240)
    lines = [
        {"text": f"{n}", "images": [f"{n // 3 * 4 + n % 3}.png", f"./{n // 3 * 4 + n % 3 + 1}.png"]} for n in range(87)
    ]
    write(tmp_path, lines)
    values = {"batch_size": 4, "num_microbatches": 2, "patch_size": 8, "max_patches": 16, "held_out": 0.4}
    config = ImageTextConfig(path=str(tmp_path / "data.jsonl"), **values)
    numbers = {
        part: {int(text.strip("#")) for text in texts_of(data, data.num_samples)}
        for part in ("train", "held_out")
        for data in [ImageText(config, part=part)]
    }
    assert numbers["train"] | numbers["held_out"] == {*range(87)}
    assert all(len(chains) % 3 == 0 for chains in numbers.values())
    chains = [{number // 3 for number in part} for part in numbers.values()]
    assert chains[0].isdisjoint(chains[1])
    assert 5 < len(chains[1]) < 20


def test_one_image_in_all_samples_leaves_nothing_to_hold_out(tmp_path):
    coloured(tmp_path, 40)
    write(tmp_path, [{"text": f"{n}", "images": ["0.png", f"{n // 2}.png"]} for n in range(40)])
    values = {"batch_size": 4, "num_microbatches": 2, "patch_size": 8, "held_out": 0.1}
    config = ImageTextConfig(path=str(tmp_path / "data.jsonl"), **values)
    with pytest.raises(ValueError, match=r"not one sample of .* \(40 of 40 share images with one another, so they are"):
        ImageText(config, part="held_out")


def test_few_samples_held_out_come_as_often_as_a_step_needs(tmp_path):
    coloured(tmp_path, 40)
    config = {"path": str(tmp_path / "data.jsonl"), "patch_size": 8, "batch_size": 24, "num_microbatches": 1}
    held = ImageText(ImageTextConfig(**config, held_out=0.2), part="held_out")
    assert 0 < held.num_samples < 12
    for step in range(4):
        assert len(read(held.batch(step))) == 24


def test_a_part_without_samples_is_refused(folder):
    path = str(folder / "data.jsonl")
    for held_out, message in ((0.0, "held_out is 0, so nothing is kept"), (1e-6, "holds back not one sample of")):
        config = ImageTextConfig(path=path, batch_size=1, num_microbatches=1, patch_size=8, held_out=held_out)
        with pytest.raises(ValueError, match=message):
            ImageText(config, part="held_out")
    with pytest.raises(ValueError, match=r"samples that are not held out, fewer than batch_size 6"):
        dataset(folder, held_out=0.99)
    with pytest.raises(ValueError, match=r"held_out is 1: give 0 or more, and less than 1"):
        dataset(folder, held_out=1)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*data\.jsonl \(No such file or directory\)"):
        dataset(tmp_path)


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (500, 20), (20, 5000), (3000, 2000), (17, 9), (40, 40)])
@pytest.mark.parametrize("max_patches", [4, 16, 100, 1024])
def test_images_keep_their_shape_within_the_most_patches(size, max_patches):
    grid = fitting_grid(*size, block=16, merge=2, max_patches=max_patches)
    assert grid.num_patches <= max_patches
    assert grid.rows % 2 == grid.columns % 2 == 0
    assert min(grid) >= 2
    if max_patches == 1024 and max(size) <= 3000 and min(size) > 16:
        assert grid.columns / grid.rows == pytest.approx(size[0] / size[1], rel=0.4)


def test_a_set_that_is_evaluated_counts_each_sample_once(folder):
    found = dataset(folder)
    once = sum(map(np.sum, found.batch(0)["weights"]))
    found.counts_once = True
    assert [sum(map(np.sum, found.batch(step)["weights"])) for step in range(3)] == [once, 0, 0]
