"""Report with a section for each question, every figure of it taken from the rows."""

from collections.abc import Sequence
from pathlib import Path

from experiments.paper.question import Question, Rows
from experiments.paper.rows import ORIGIN
from experiments.paper.run import PARTS, row_file

REPORT = "README.md"
_HEAD = """# Evaluation

How much faster is a readiness-first pipeline than a fixed order, when, and for how much memory? Each section asks one
question of the [paper](https://arxiv.org/abs/2605.18750), or one that the paper leaves open. `make paper` measures
everything again, quickly; `python -m experiments.paper report` writes this page from the rows in `results/`,
and no figure is written by hand. Commands with `--folder docs` were run when this page lay there: today the folder is
`experiments/paper`.

"1.234 ± 0.010 (least 1.198)" is a speed-up: the geometric mean over cells, its 95% interval, and the least of them.
*Held* counts the activations of whole microbatches on the stage that holds most. Strict 1F1B holds `p - s` on stage
`s` of `p`; *within its memory* means on every stage. *Foresight* is a table used as a hint, within the table's own
memory, that waits briefly for its next entry ([orders](../../docs/orders.md))."""


def write_report(questions: Sequence[Question], folder: Path) -> list[str]:
    """Writes the report of the measured questions. Returns the names of questions without rows, which it leaves out."""
    sections, missing = [_HEAD], []
    path = folder / REPORT
    for question in questions:
        rows = row_file(question, folder).complete_rows()
        if rows:
            sections.append(_section(question, rows, path))
        else:
            missing.append(question.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return missing


def _section(question: Question, rows: Rows, path: Path) -> str:
    """Returns a section. Its rows are in the order of the settings, so that the order of measuring never shows."""
    ordered = sorted(rows, key=lambda row: tuple(map(_sortable, (row[name] for name in question.settings))))
    pictures = path.parent / PARTS
    return "\n\n".join([f"## {question.title}", question.write(ordered, pictures), _origin(rows)])


def _origin(rows: Rows) -> str:
    version, machine, command = ("; ".join(sorted({row[name] for row in rows})) for name in ORIGIN)
    return f"<sub>`{command}`, version {version}, on {machine}.</sub>"


def _sortable(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), "")
    except ValueError:
        return (1, 0.0, text)
