"""Texts of others in sentences: short, and without characters that a terminal would obey."""

from rrfp_jax.bounded_text import printable, sentence, shown


def test_a_value_is_shown_in_a_line_or_two() -> None:
    deep = {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}
    for value in ("x" * 3_000_000, [["a"] * 9] * 9, deep, 10**5000, 9**250, b"\0" * 999):
        assert len(shown(value)) <= 200


def test_a_short_value_is_shown_as_it_is() -> None:
    assert [shown(each) for each in (1.5, "a\x1b", None, ["b", 2])] == ["1.5", r"'a\x1b'", "None", "['b', 2]"]


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b[2J\x07\x9b31m\r\u202e\ud800\n\tb \u00e4\u6587") == (
        "a\\x1b[2J\\x07\\x9b31m\\r\\u202e\\ud800\n\tb \u00e4\u6587"
    )


def test_a_sentence_keeps_its_beginning_and_its_remedy() -> None:
    told = sentence(f"file {'x' * 10**6} holds\n  {'some words ' * 10**5}: mend it\x1b")
    assert len(told) < 5_000
    assert told.startswith("file xxx")
    assert told.endswith(": mend it\\x1b")
