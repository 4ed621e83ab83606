"""The examples of the documentation, as they stand in its files."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "experiments" / "paper" / "schedules.md",
    ROOT / "tpu_gpu_configs" / "README.md",
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @cached_property
    def commands(self) -> list[str]:
        """The commands of a ``console`` block, each in one line, without comments."""
        joined = _COMMENT.sub("", self.text).replace("\\\n", " ")
        return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


def blocks(language: str) -> list[Block]:
    """Every block of a language, in the order of the files."""
    return [block for block in _all_blocks() if block.language == language]


def languages() -> set[str]:
    """The languages that occur; empty where a fence names none."""
    return {block.language for block in _all_blocks()}


def _all_blocks() -> list[Block]:
    return [
        Block(path, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2])
        for path in FILES
        for text in [path.read_text()]
        for fence in _FENCE.finditer(text)
    ]


def module_and_flags(command: str) -> tuple[str, list[str]] | None:
    """Of ``python -m experiments.NAME ...`` or ``rrfp NAME ...`` the name and the rest; None for another command."""
    match shlex.split(command):
        case ["python", "-m", module, *rest] if module.startswith("experiments."):
            return module.removeprefix("experiments."), rest
        case ["rrfp", name, *rest]:
            return name, rest
    return None
