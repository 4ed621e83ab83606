"""A key of a configuration, or a section with all its keys, explained: text, type, default, options, and who gives it
which value."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from rrfp_jax.commands.common.options import as_text, field_texts, field_words, flag_of, whole_flag, wrap
from rrfp_jax.commands.training.config import QUALIFIED, SECTIONS, choices_of_options, in_one_line
from rrfp_jax.commands.training.config_sources import find_preset, preset_names
from rrfp_jax.record_files import read_yaml

Given = tuple[str, Mapping[str, Mapping[str, Any]]]
"""The name of a configuration, and its sections with their keys."""
_HEAD_WIDTH = 10


def all_names() -> list[str]:
    """Returns the sections, and all keys with theirs."""
    return [*SECTIONS, *(f"{section}.{key}" for section in SECTIONS for key in _keys(section))]


def find_key(name: str) -> tuple[str, str | None]:
    """Returns section and key that a user means; the key is None for a section.

    Raises ValueError on a name that is none, with the nearest, and on a key that several sections have.
    """
    section, dot, key = name.lstrip("-").replace("-", "_").partition(".")
    if not dot and section in SECTIONS:
        return section, None
    if not dot:
        key, owners = section, [each for each in SECTIONS if section in _keys(each)]
        if not owners:
            every = [*SECTIONS, *dict.fromkeys(each for section in SECTIONS for each in _keys(section))]
            raise ValueError(f"{key!r} is no key and no section: {_nearest(key, every)}")
        if len(owners) > 1:
            names = ", ".join(f"{section}.{key}" for section in owners)
            raise ValueError(f"{key!r} is a key of several sections: name one of {names}")
        return owners[0], key
    if section not in SECTIONS:
        raise ValueError(f"{section!r} is no section: {_nearest(section, [*SECTIONS])}")
    if key not in _keys(section):
        near = difflib.get_close_matches(key, _keys(section), n=1)
        known = f"the keys of {section} are {', '.join(_keys(section))}"
        elsewhere = [f"did you mean {other}.{key}" for other in SECTIONS if key in _keys(other)]
        advice = [*elsewhere, f"did you mean {section}.{near[0]}" if near else known]
        raise ValueError(f"{section!r} has no key {key!r}: {advice[0]}")
    return section, key


def explain_key(section: str, key: str, given: Given | None = None) -> str:
    """Returns the full explanation of one key; ``given`` adds the value of one configuration."""
    name = f"{section}.{key}"
    words = field_words(SECTIONS[section], key, choices_of_options().get(name, ()))
    rows = [("type", words.kind), ("default", words.default or "none: a file must give it")]
    if words.choices:
        rows.append(("choices", ", ".join(words.choices)))
    flags = dict.fromkeys([flag_of(SECTIONS, name, QUALIFIED), whole_flag(name)])
    rows += [("option", ", ".join(flags)), ("section", f"{section}: {field_texts(SECTIONS[section])['']}")]
    by_value: dict[str, list[str]] = {}
    for preset, sections in _presets().items():
        if (value := _value(sections, section, key)) is not None:
            by_value.setdefault(value, []).append(preset)
    of_presets = "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())
    rows.append(("presets", of_presets or "none gives it"))
    if given is not None:
        rows.append(("value", f"{_value(given[1], section, key) or f'no section {section}'} in {given[0]}"))
    lines = [name, *wrap(words.text, indent="  ", start="  "), ""]
    for head, text in rows:
        lines += wrap(text, indent=" " * (2 + _HEAD_WIDTH), start=f"  {head:<{_HEAD_WIDTH}}")
    return "\n".join(lines)


def explain_section(section: str, given: Given | None = None) -> str:
    """Returns the purpose of a section and a sentence on each key; ``given`` adds the values of one configuration."""
    lines = wrap(f"{section}: {field_texts(SECTIONS[section])['']}.")
    for key in _keys(section):
        words = field_words(SECTIONS[section], key, choices_of_options().get(f"{section}.{key}", ()))
        value = None if given is None else _value(given[1], section, key)
        here = "" if value is None or given is None else f"; {value} in {given[0]}"
        text = f"{words.short} ({words.kind}; {words.left_out}{here})."
        lines += ["", f"  {section}.{key}", *wrap(text, indent=" " * 4, start=" " * 4)]
    lines += ["", f"rrfp config --explain {section}.{_keys(section)[0]} says all about one of them."]
    lines += [f"{other}.{section} is a key of the same name." for other in SECTIONS if section in _keys(other)]
    return "\n".join(lines)


def _keys(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}" if near else f"the sections are {', '.join(SECTIONS)}"


@cache
def _presets() -> dict[str, Any]:
    return {name: read_yaml(find_preset(name).read_text(encoding="utf-8")) for name in preset_names()}


def _value(sections: Mapping[str, Mapping[str, Any]], section: str, key: str) -> str | None:
    """Returns the value as a user writes it; None if the key is not given."""
    if key not in sections.get(section, {}):
        return None
    value = sections[section][key]
    if isinstance(value, Mapping):
        return in_one_line(value)
    return as_text(value) or "an empty list"
