"""Every program of the language's page prints what stands behind it.

They are pure and run in this process. ``python -m tests.documentation.test_language_tutorial`` writes the outputs anew.
"""

import io
import re
from contextlib import redirect_stdout

import pytest

from rrfp_jax.schedules.registry import KNOWN
from tests.documentation.blocks import ROOT

PAGE = ROOT / "docs" / "schedules.md"
_STEP = re.compile(r"```python\n((?:(?!```).)*)```\n\n```text\n((?:(?!```).)*)```", re.DOTALL)
STEPS = _STEP.findall(PAGE.read_text(encoding="utf-8"))


def printed(program: str) -> str:
    known, output = dict(KNOWN), io.StringIO()
    try:
        with redirect_stdout(output):
            exec(program, {"__name__": "tutorial"})
    finally:
        KNOWN.clear()
        KNOWN.update(known)
    return output.getvalue()


def test_three_of_the_five_steps_have_a_program() -> None:
    assert len(STEPS) == 3


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_a_step_prints_what_the_page_says(number: int) -> None:
    program, text = STEPS[number]
    assert printed(program) == text


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_STEP.sub(lambda m: f"```python\n{m[1]}```\n\n```text\n{printed(m[1])}```", page), encoding="utf-8")
