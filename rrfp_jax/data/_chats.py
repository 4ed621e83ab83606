"""Writes chats as text with the tokenizer's own chat template, and tells which of the text is the assistant's.

A template is code that comes with a model, so it runs in jinja2's sandbox, set up as ``transformers`` does it: the same
messages give the same text, and the same tokens.

The assistant's text is what the template writes between ``{% generation %}`` and ``{% endgeneration %}``. A template
without these marks writes each conversation several times: up to an answer, with the prompt for it, and with the
answer as the last message. Both texts must be beginnings of the whole, and the answer is what lies between their ends.
The end token that a template puts behind the last message alone may follow in the second text. A template that writes
an answer in another way once others follow fits no such rule, and is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rrfp_jax.data._documents import TextPart, TextSpan, document_name, rows_in
from rrfp_jax.data._sources import LONGEST_DOCUMENT_BYTES, TOOLS
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, named_token, object_in, tokenizer_file
from rrfp_jax.readable import sentence, shown
from rrfp_jax.record_files import TEXT_BYTES, read_bounded

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_PROCESSOR = "chat_template.json"
_MARK = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message has its reasoning; templates read the first, and some the second."""
_Turns = list[tuple[int, int]]
"""Beginnings and ends of the assistant's turns in a text, in characters."""


class _Generation(Extension):
    """Notes where the text between the marks stands in the text that has been written so far."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it
    num_written = 0
    turns: _Turns = []  # noqa: RUF012 - a new list for each text

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        self.turns.append((self.num_written, self.num_written + len(text)))
        return text


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The library's own filter would escape what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=4)
def _compiled(text: str, now: datetime) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
    return environment.from_string(text)


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer; the same in every process that tokenises."""

    file: Path
    texts: Mapping[str, str]
    """The template by its name: ``default``, or ``tool_use`` for chats with tools."""
    tokens: Mapping[str, str]
    """Tokens that templates know by name, such as ``bos_token``."""
    now: datetime
    """The time that templates get, so that all processes write the same date."""

    @property
    def is_dated(self) -> bool:
        """Whether the template asks for the date."""
        return any("strftime_now" in text for text in self.texts.values())

    @property
    def settings(self) -> list[Any]:
        """All that decides the text of a chat."""
        return [dict(self.texts), dict(self.tokens), str(self.now.date()) if self.is_dated else None]

    def parts_in(self, span: TextSpan, column: str) -> Iterator[TextPart]:
        """Yields the chats of a span; raises BrokenData, with file and row, for one that cannot be written."""
        for place, row in rows_in(span, column):
            try:
                text, turns = self.written(row, column)
                text.encode()
            except UnicodeEncodeError:
                fault = f"half a character in column {column!r} (a lone surrogate)"
                raise BrokenData(f"{document_name(span.source, place)} has {fault}: mend or remove it") from None
            except ValueError as error:
                raise BrokenData(f"{document_name(span.source, place)} {error}") from None
            yield TextPart(text, True, place, tuple(turns))

    def written(self, row: Mapping[str, Any], column: str) -> tuple[str, _Turns]:
        """Returns the text of a chat and the assistant's turns in it; raises ValueError for one that cannot be
        written."""
        messages, tools = _messages_of(row.get(column), column), row.get(TOOLS)
        if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
            raise ValueError(f"has {shown(tools)} in column {TOOLS!r} where a list of objects is expected: mend it")
        name = "tool_use" if tools is not None and "tool_use" in self.texts else "default"
        if name not in self.texts:
            raise ValueError(f"needs the chat template {name!r}, which {self.file} does not have: add it")
        template = self.texts[name]

        def write(messages: Sequence[Any], *, prompts: bool) -> tuple[str, _Turns]:
            return self._rendered(template, {"messages": messages, "tools": tools, "add_generation_prompt": prompts})

        whole, turns = write(messages, prompts=False)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if _MARK.search(template) is None:
            for number in answers:
                before = write(messages[:number], prompts=True)[0]
                until = write(messages[: number + 1], prompts=False)[0]
                if not whole.startswith(until):  # some templates close the last message by a token of its own
                    until = until.removesuffix(self.tokens.get("eos_token", ""))
                if not (whole.startswith(until) and until.startswith(before)):
                    raise ValueError(
                        f"cannot be cut into turns, for the template in {self.file} writes message {number} (from 0) "
                        "in another way where the chat goes on: put {% generation %} and {% endgeneration %} around "
                        "the assistant's text in the template"
                    )
                turns.append((len(before), len(until)))
        if answers and not any(start < end for start, end in turns):
            raise ValueError(
                f"has turns of the assistant, and the template in {self.file} writes none of them: mend or remove it"
            )
        return whole, turns

    def _rendered(self, template: str, variables: Mapping[str, Any]) -> tuple[str, _Turns]:
        compiled = _compiled(template, self.now)
        marks: Any = compiled.environment.extensions[_Generation.identifier]
        marks.num_written, marks.turns = 0, []
        blocks = []
        try:
            for block in compiled.generate(**self.tokens, **variables):
                blocks.append(block)
                marks.num_written += len(block)
                if marks.num_written > LONGEST_DOCUMENT_BYTES:
                    raise ValueError(f"it writes more than {LONGEST_DOCUMENT_BYTES:,} characters")
        except Exception as error:  # a template may do anything with a message
            reason = sentence(str(error)) or type(error).__name__
            raise ValueError(
                f"does not fit the chat template in {self.file} ({reason}): mend or remove it, or mend the template"
            ) from None
        return "".join(blocks), marks.turns


def _messages_of(value: Any, column: str) -> list[dict[str, Any]]:
    """Returns messages as templates get them; raises ValueError if there are none."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"has {shown(value)} in column {column!r} where a list of messages is expected: mend it")
    messages = []
    for message in value:
        is_object = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_object or not (isinstance(message.get("content"), str | list) or message.get("tool_calls")):
            raise ValueError(
                f"has the message {shown(message)} in column {column!r} where an object with role and content is "
                "expected: mend it"
            )
        # Columns of Parquet have null for a key that a message lacks, and templates would write it.
        given = {key: each for key, each in message.items() if each is not None}
        reasoning = next((given[key] for key in _REASONING if key in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        messages.append(given)
    return messages


def read_chat_template(tokenizer: str, *, of_processor: bool = False) -> ChatTemplate:
    """Returns the template that belongs to a tokenizer's file or folder, or to the processor of images there.

    As for ``transformers``, chat_template.jinja counts before the ``chat_template`` of tokenizer_config.json, and for a
    processor chat_template.json does too. Raises ValueError, with the remedy, if there is none, or none that can be
    used.
    """
    file = tokenizer_file(tokenizer)
    config, alone = file.with_name(TOKENIZER_CONFIG), file.with_name(CHAT_TEMPLATE)
    settings = object_in(config)
    given: Any = settings.get("chat_template")
    if of_processor and (of_images := object_in(file.with_name(_OF_PROCESSOR)).get("chat_template")) is not None:
        given, config = of_images, file.with_name(_OF_PROCESSOR)
    if alone.is_file():
        try:
            given = read_bounded(alone, TEXT_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no UTF-8"
            raise ValueError(f"chat template {alone} cannot be read ({reason}): mend it") from None
        config = alone
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    texts = given if isinstance(given, dict) else {"default": given}
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(
            f"the data has chats, and the tokenizer {file} has no chat template: put the {CHAT_TEMPLATE} of a model "
            "with this tokenizer beside it, or name the folder of another tokenizer"
        )
    tokens = {name: token for name in _NAMED_TOKENS if (token := named_token(settings, name)) is not None}
    template = ChatTemplate(config, texts, tokens, datetime.now())
    for text in texts.values():
        try:
            _compiled(text, template.now)
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {sentence(str(error.message))}"
            raise ValueError(f"the chat template in {config} is none ({reason}): mend it") from None
    return template
