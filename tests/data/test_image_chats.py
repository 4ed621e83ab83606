"""Chats with images: a template writes them, a token of the model stands for each feature, and answers count."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rrfp_jax.data import ImageText, ImageTextConfig
from rrfp_jax.data.images import ImageTokens, TextWriter
from rrfp_jax.data.tokenizer_files import kind_of_file
from tests.data.chats import save_tokenizer

TEMPLATE = """{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{{ '<|tool|>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ASKED = [
    {"role": "user", "content": [text("süß? "), IMAGE, text(" and "), IMAGE]},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": [{**IMAGE, "path": "wide.png"}, text("this?")]},
    {"role": "assistant", "content": "Yes, it is."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    save_tokenizer(folder / "model", "phi", TEMPLATE)
    for name, (width, height) in {"wide.png": (48, 16), "small.png": (16, 16)}.items():
        Image.new("RGB", (width, height)).save(folder / name)
    return folder


def dataset(folder: Path, *lines: dict[str, Any], **marks: Any) -> ImageText:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kind = kind_of_file(folder / "model" / "tokenizer.json", (0,))
    ids = TextWriter(kind, None, opens=False)._tokenizer
    writer = TextWriter(kind, ImageTokens(feature=ids.token_to_id("<|tool|>"), **marks), opens=True)
    config = ImageTextConfig(
        path=str(path), batch_size=1, num_microbatches=1, patch_size=8, min_patches=4, max_patches=64
    )
    return ImageText(config, writer=writer, has_grid_positions=True)


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        ({}, "{}"),
        ({"before": "<s>", "behind": "</s>"}, "<s>{}</s>"),  # a processor writes these, as InternVL's
        ({"before": "<s>", "behind": "</s>", "are_in_chats": True}, "{}"),  # the template would have, as Qwen's
    ],
)
def test_a_chat_becomes_its_tokens_and_answers_count(folder: Path, marks: dict[str, Any], shown: str) -> None:
    data = dataset(folder, {"messages": ASKED, "images": ["small.png", "wide.png"]}, **marks)
    (sample,) = data.samples(0)
    one, three = (shown.format("<|tool|>" * number) for number in (1, 3))
    whole = f"<|user|>süß? {one} and {three}<|end|><|assistant|>No.<|end|>"
    whole += f"<|user|>{three}this?<|end|><|assistant|>Yes, it is.<|end|>"
    tokenizer = data._writer._tokenizer
    expected = tokenizer.encode(whole, add_special_tokens=False)
    assert [*sample.tokens.tolist(), sample.targets[-1]] == expected.ids
    counted = tokenizer.decode(sample.targets[sample.weights > 0].tolist(), skip_special_tokens=False)
    assert counted == "No.<|end|>Yes, it is.<|end|>"
    assert [tuple(grid) for grid in sample.images] == [(2, 2), (2, 6), (2, 6)]
    batch = data.batch(0)
    assert batch["positions"][0].shape == (*batch["tokens"][0].shape, 3)
    assert np.array_equal(batch["positions"][0][0, : sample.length], sample.grid_positions(2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": ASKED}, r"line 1 .* has an image in its messages without a file: name one there or in images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}]},
            r"line 1 .* has content of type 'video' in its messages: give entries of text and image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"image": "wide.png"}]}]},
            r"line 1 .* has content without type or text in its messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{**IMAGE, "url": "https://a.org/b.png"}]}]},
            r"line 1 .* has an image in its messages without a file",
        ),
        ({"messages": ASKED[:1], "images": ["wide.png"] * 3}, r"names more images than its messages show"),
        ({"messages": ASKED[:1], "images": ["small.png"] * 2}, r"line 1 .* has no turn of the assistant to predict"),
        (
            {"messages": [{"role": "user", "content": "<|tool|>"}, ASKED[1]]},
            r"line 1 .* has 0 images, and the chat template writes 1 times '<\|tool\|>' for them",
        ),
        ({"messages": "Hello"}, r"line 1 .* has 'Hello' in column 'messages' where a list of messages is expected"),
        (
            {"messages": ASKED, "text": "a"},
            r"line 1 .* must be an object with text, or with prompt and target, or with m",
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}], "images": ["none.png"]}, r"image .*none\.png, of line 1"),
    ],
)
def test_a_bad_chat_is_named(folder: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(folder, line)


def test_chats_need_a_tokenizer_and_a_template_without_the_date(folder: Path, tmp_path: Path) -> None:
    line = {"messages": ASKED[1:2]}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    config = ImageTextConfig(path=str(tmp_path / "data.jsonl"), batch_size=1, num_microbatches=1)
    with pytest.raises(
        ValueError, match=r"has messages, and its tokens would be bytes: give a tokenizer with a template"
    ):
        ImageText(config)
    save_tokenizer(tmp_path / "model", "phi", "{{ strftime_now('%d') }}" + TEMPLATE)
    with pytest.raises(
        ValueError, match=r"the chat template in .*jinja writes the date, and a run that goes on tomorrow"
    ):
        dataset(tmp_path, line)
    # other text by the same template is other data
    before = dataset(folder, line).fingerprint
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "<|end|>\n"))
    assert dataset(folder, line).fingerprint != before
