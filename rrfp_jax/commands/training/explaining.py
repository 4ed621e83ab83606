"""A key of a configuration, or a section with all its keys, explained: text, type, default, options, and who gives it
which value."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import yaml

from rrfp_jax.commands.common.field_words import FieldWords, as_text, field_texts, field_words
from rrfp_jax.commands.common.options import flag_of, whole_flag, wrap
from rrfp_jax.commands.training.config import QUALIFIED, SECTIONS, choices_of_options
from rrfp_jax.commands.training.presets import find_preset, preset_names
from rrfp_jax.yaml_text import read_yaml

Given = tuple[str, Mapping[str, Mapping[str, Any]]]
"""The name of a configuration, and its sections with their keys."""
_ROOM = 10


def all_names() -> list[str]:
    """The sections, and all keys with theirs."""
    return [*SECTIONS, *(f"{section}.{key}" for section in SECTIONS for key in _keys(section))]


def find_key(name: str) -> tuple[str, str | None]:
    """Section and key that a user means; the key is None where it is a section.

    Raises ValueError on a name that is none, with the nearest, and on a key that several sections have.
    """
    section, dot, key = name.lstrip("-").replace("-", "_").partition(".")
    if not dot:
        return (section, None) if section in SECTIONS else (_only_section_of(section), section)
    if section not in SECTIONS:
        raise ValueError(f"{section!r} is no section: {_nearest(section, [*SECTIONS])}")
    if key not in _keys(section):
        near = difflib.get_close_matches(key, _keys(section), n=1)
        owners = [f"{other}.{key}" for other in SECTIONS if key in _keys(other)]
        advice = f"did you mean {section}.{near[0]}" if near else _those_of(section)
        raise ValueError(f"{section!r} has no key {key!r}: {f'did you mean {owners[0]}' if owners else advice}")
    return section, key


def _only_section_of(key: str) -> str:
    owners = [section for section in SECTIONS if key in _keys(section)]
    if not owners:
        every = [*SECTIONS, *dict.fromkeys(each for section in SECTIONS for each in _keys(section))]
        raise ValueError(f"{key!r} is no key and no section: {_nearest(key, every)}")
    if len(owners) > 1:
        names = ", ".join(f"{section}.{key}" for section in owners)
        raise ValueError(f"{key!r} is a key of several sections: name one of {names}")
    return owners[0]


def _keys(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}" if near else f"the sections are {', '.join(SECTIONS)}"


def _those_of(section: str) -> str:
    return f"the keys of {section} are {', '.join(_keys(section))}"


def explain_key(section: str, key: str, given: Given | None = None) -> str:
    """Returns the full explanation of one key; ``given`` adds the value of one configuration."""
    words = _words(section, key)
    rows = [("type", words.kind), ("default", words.default or "none: a file must give it")]
    if words.choices:
        rows.append(("choices", ", ".join(words.choices)))
    name = f"{section}.{key}"
    flags = dict.fromkeys([flag_of(SECTIONS, name, QUALIFIED), whole_flag(name)])
    rows += [("option", ", ".join(flags)), ("section", f"{section}: {field_texts(SECTIONS[section])['']}")]
    rows.append(("presets", _in_presets(section, key)))
    if given is not None:
        rows.append(("value", f"{_value(given[1], section, key) or f'no section {section}'} in {given[0]}"))
    return "\n".join([name, *_indented(words.text), "", *_table(rows)])


def explain_section(section: str, given: Given | None = None) -> str:
    """Returns the purpose of a section and a sentence on each key; ``given`` adds the values of one configuration."""
    lines = wrap(f"{section}: {field_texts(SECTIONS[section])['']}.")
    for key in _keys(section):
        words = _words(section, key)
        value = None if given is None else _value(given[1], section, key)
        here = "" if value is None or given is None else f"; {value} in {given[0]}"
        lines += ["", f"  {section}.{key}", *_indented(f"{words.short} ({words.kind}; {words.left_out}{here}).", 4)]
    lines += ["", f"rrfp config --explain {section}.{_keys(section)[0]} says all about one of them."]
    lines += [f"{other}.{section} is a key of the same name." for other in SECTIONS if section in _keys(other)]
    return "\n".join(lines)


def _words(section: str, key: str) -> FieldWords:
    return field_words(SECTIONS[section], key, choices_of_options().get(f"{section}.{key}", ()))


def _in_presets(section: str, key: str) -> str:
    """The presets by the value that their files give the key."""
    by_value: dict[str, list[str]] = {}
    for name, sections in _presets().items():
        if (value := _value(sections, section, key)) is not None:
            by_value.setdefault(value, []).append(name)
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items()) or "none gives it"


@cache
def _presets() -> dict[str, Any]:
    return {name: read_yaml(find_preset(name).read_text(encoding="utf-8")) for name in preset_names()}


def _value(sections: Mapping[str, Mapping[str, Any]], section: str, key: str) -> str | None:
    """The value as one writes it; None where the key is not given."""
    if key not in sections.get(section, {}):
        return None
    value = sections[section][key]
    if isinstance(value, Mapping):
        return yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=1000).strip()
    return as_text(value) or "an empty list"


def _indented(text: str, indent: int = 2) -> list[str]:
    return wrap(text, indent=" " * indent, start=" " * indent)


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    for head, text in rows:
        yield from wrap(text, indent=" " * (2 + _ROOM), start=f"  {head:<{_ROOM}}")
