"""Chats become the tokens, and the mask of the assistant's tokens, that transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.data.tokenizing import TokenizeOptions, tokenize
from rrfp_jax.data.tokens import TokenSet
from tests.data.chats import TEMPLATES, random_chat, save_tokenizer, unmarked

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
_TOOL = {"type": "function", "function": {"name": "count", "parameters": {"of": {"type": "string"}, "<b>": [1, 2.5]}}}
_CALL = {"type": "function", "function": {"name": "count", "arguments": {"of": "legs & süß"}}}
_WITH_TOOLS = [
    {"role": "user", "content": "Count its legs."},
    {"role": "assistant", "content": None, "reasoning": "A tool can.", "tool_calls": [_CALL]},
    {"role": "tool", "content": "8"},
    {"role": "assistant", "content": "Eight.", "thinking": "So it says."},
]


def rows_for(family: str, number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"messages": random_chat(seed)} for seed in range(number)]
    return rows + [{"messages": _WITH_TOOLS, "tools": [_TOOL]}] * (family == "chatml")


def made(tmp_path: Path, folder: Path, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize(
        [tmp_path / "chats.jsonl"],
        tmp_path / "set",
        TokenizeOptions(tokenizer=str(folder), column="messages"),
        workers=1,
    )
    found = []
    with TokenSet(tmp_path / "set") as tokens:
        tokens.check()
        for number in range(tokens.num_documents):
            start, stop = tokens.document(number)
            ids, counted = tokens.tokens(start, stop), tokens.counted(np.array([start]), stop - start)[0]
            found.append((ids.tolist(), counted.astype(int).tolist()))
    return found


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("family", list(TEMPLATES))
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, family: str, is_marked: bool) -> None:
    template = TEMPLATES[family] if is_marked else unmarked(TEMPLATES[family])
    folder = save_tokenizer(tmp_path / "model", family, template, is_inside=is_marked)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == template
    rows = rows_for(family, 60)
    if family == "gemma" and not is_marked:
        rows = rows[:60]
    for row, (ids, counted) in zip(rows, made(tmp_path, folder, rows), strict=True):
        expected = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_assistant_tokens_mask=True, return_dict=True
        )
        wanted, mask = expected["input_ids"], expected["assistant_masks"]
        if wanted[-1] != theirs.eos_token_id:  # a document is closed, and nobody learns this
            assert (ids.pop(), counted.pop()) == (theirs.eos_token_id, 0)
        assert ids == wanted
        if is_marked:
            assert counted == mask
