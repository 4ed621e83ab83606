"""Counts of the house: ``python -m tests.house PATH ...`` prints them, and says where prose breaks the rules.

The rules hold for the docstrings of the library and the experiments, and for README, CHANGELOG and the pages of docs/.
``make lint`` runs this file over both packages.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = {"what", "who", "whom", "of", "those", "likewise", "where"}
"""Words with which no docstring begins: a reader would have to guess the noun."""
MOST_WHAT = 1 / 1_000
FEWEST_WORDS = 3
MOST_LINES = {"README.md": 120, "CHANGELOG.md": 80}
MOST_PAGES, MOST_WORDS = 13, 19_000
"""Bounds on the pages directly in docs/: how many there are, and their words together, code included."""


def python_files(paths: list[str]) -> list[Path]:
    """Returns the Python files under the paths, sorted, without stubs."""
    found = [each for path in map(Path, paths) for each in ([path] if path.suffix == ".py" else path.rglob("*.py"))]
    return sorted(each for each in found if "__pycache__" not in each.parts)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring, those that stand below attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for previous, statement in zip([None, *body], body, strict=False):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                is_first = previous is None and isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                )
                if is_first or isinstance(previous, ast.Assign | ast.AnnAssign):
                    yield statement.lineno, statement.value.value


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case; code between backquotes counts as one word."""
    return [word.lower() for word in re.findall(r"[A-Za-z']+", re.sub(r"``[^`]*``|`[^`]*`", " code ", text))]


def prose_faults(paths: list[str]) -> list[str]:
    """Returns one line for each fault of docstrings in these Python files."""
    found, num_words, num_what = [], 0, 0
    for path in python_files(paths):
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            words = words_of(text)
            num_words, num_what = num_words + len(words), num_what + words.count("what")
            if words and words[0] in FIRST_WORDS:
                found.append(f"{path}:{line}: begins with {words[0].capitalize()}: {text.splitlines()[0]}")
            elif len(words) < FEWEST_WORDS:
                found.append(f"{path}:{line}: fewer than {FEWEST_WORDS} words: {text.splitlines()[0]}")
    if num_what > num_words * MOST_WHAT:
        found.append(f"'what' stands {1_000 * num_what / num_words:.1f} times in 1,000 words of docstrings: at most 1")
    return found


def page_faults(root: Path) -> list[str]:
    """Returns one line for each fault of README, CHANGELOG and the pages of docs/: too long, or unclear words."""
    readme, pages = root / "README.md", sorted((root / "docs").glob("*.md"))
    found = [
        f"{name}: more than {most} lines"
        for name, most in MOST_LINES.items()
        if len((root / name).read_text(encoding="utf-8").splitlines()) > most
    ]
    if len(pages) > MOST_PAGES:
        found.append(f"docs: {len(pages)} pages, at most {MOST_PAGES}")
    if (num := sum(len(page.read_text(encoding="utf-8").split()) for page in pages)) > MOST_WORDS:
        found.append(f"docs: {num} words, at most {MOST_WORDS}")
    for name, paths in (("README.md", [readme]), ("docs", pages)):
        words = [word for path in paths for word in words_of(path.read_text(encoding="utf-8"))]
        if (num_what := words.count("what")) > len(words) * MOST_WHAT:
            found.append(f"{name}: 'what' stands {num_what} times in {len(words)} words, at most 1 in 1,000")
    return found


def public_names(paths: list[str]) -> dict[str, list[Path]]:
    """Returns the modules that define each public name at their top level."""
    found = defaultdict[str, list[Path]](list)
    for path in python_files(paths):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                if not name.startswith("_") and path not in found[name]:
                    found[name].append(path)
    return found


def counts(paths: list[str]) -> dict[str, float]:
    """Returns files, lines, lines per named function or class, and the share of comment lines."""
    files = python_files(paths)
    texts = [path.read_text(encoding="utf-8") for path in files]
    num_lines = sum(len(text.splitlines()) for text in texts)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    num_named = sum(isinstance(node, kinds) for text in texts for node in ast.walk(ast.parse(text)))
    num_comments = sum(line.lstrip().startswith("#") for text in texts for line in text.splitlines())
    return {
        "files": len(files),
        "lines": num_lines,
        "lines per name": num_lines / max(1, num_named),
        "comment lines %": 100 * num_comments / max(1, num_lines),
    }


def main(paths: list[str]) -> int:
    """Prints counts, names that several modules define, and the faults of prose; 1 where there are any."""
    print("  ".join(f"{name} {value:.4g}" for name, value in counts(paths).items()))
    for name, modules in sorted(public_names(paths).items()):
        if len(modules) > 1:
            print(f"{name} is defined in {', '.join(map(str, modules))}")
    faults = [*prose_faults(paths), *page_faults(Path(__file__).parents[1])]
    print(*faults, sep="\n")
    starts = Counter(line.split(": ")[1].split(":")[0] for line in faults)
    print(f"{len(faults)} faults of prose", dict(starts.most_common(4)))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
