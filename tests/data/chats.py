"""Chats, a small tokenizer, and chat templates in the styles of five families, with the assistant's text marked."""

import json
import random
import re
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"),
)
_CHATML = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if message.reasoning_content %}
                {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + (call.function | tojson(sort_keys=true)) + '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LLAMA = """{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
_MISTRAL = """{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content + '\\n\\n' -%}
    {%- elif message.role == 'user' or message.role == 'tool' -%}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' -}}
        {%- set ns.system = '' -%}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- raise_exception('only system, user, tool and assistant are known') -}}
    {%- endif -%}
{%- endfor -%}"""
_GEMMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}
{%- else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
_PHI = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}{% generation %}\
{{ message['content'] + '<|end|>\\n' }}{% endgeneration %}{% else %}{{ '<|' + message['role'] + '|>\\n' + \
message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
TEMPLATES = {"chatml": _CHATML, "llama": _LLAMA, "mistral": _MISTRAL, "gemma": _GEMMA, "phi": _PHI}
_ENDS = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "phi": {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
}
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "How many legs has a süß spider? "},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "And a fly?\n"},
    {"role": "assistant", "content": "Six, and two wings. 🪰"},
]


def unmarked(template: str) -> str:
    """The same template without marks around the assistant's text."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 if true \2%}{%\1 endif \2%}", template)


def save_tokenizer(folder: Path, family: str, template: str | None = None, *, is_inside: bool = False) -> Path:
    """Write a tokenizer with the template of a family, or another one; ``is_inside``: in tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([json.dumps(CHAT), _CHATML, "assistant user system model tool"] * 3, trainer)
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=family == "llama")
    bpe.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **_ENDS[family]}
    template = TEMPLATES[family] if template is None else template
    if is_inside:
        settings["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def random_chat(seed: int) -> list[dict[str, Any]]:
    """A chat of one to five exchanges, with odd text, a system message or none, and several answers in a row."""
    chance = random.Random(seed)
    words = ["spider", "  two  ", "süß", "🪰", "<b>", "\n", "fly's", '"q"', "<|im_end|>", "{{ x }}", "漢字", "a" * 9]
    chat = [{"role": "system", "content": "Answer briefly."}] if chance.random() < 0.5 else []
    for _ in range(chance.randint(1, 5)):
        roles = ("user", "assistant") if chance.random() < 0.9 else ("user", "assistant", "assistant")
        chat += ({"role": each, "content": " ".join(chance.choices(words, k=chance.randint(1, 12)))} for each in roles)
    return chat


def write_chats(path: Path, chats: list[Any], **more: Any) -> Path:
    """Write chats as JSON lines."""
    path.write_text("".join(json.dumps({"messages": chat, **more}) + "\n" for chat in chats))
    return path
