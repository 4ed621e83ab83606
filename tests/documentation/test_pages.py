"""The pages stay short and plain, and every link between them leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.documentation.blocks import FILES, ROOT
from tests.house import page_faults

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PAGES = [*FILES, ROOT / "CHANGELOG.md", ROOT / "experiments" / "paper" / "README.md"]


def anchors(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as forges and Sphinx make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    missing = []
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        is_there = "://" in link or (path.exists() and (not anchor or anchor in anchors(path)))
        missing += [] if is_there else [link]
    assert missing == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name not in index and page.stem != "README"
    ] == []


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "rrfp_jax").glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}/`" not in text] == []


def test_packages_keep_their_budgets_of_lines() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Packages")[2]
    rows = re.findall(r"^\| (`[^|]*|modules beside[^|]*) \| .* \| ([\d, ]+) \|$", page, re.MULTILINE)
    budgets: dict[str, int] = {}
    for names, numbers in rows:
        each = [name.strip("`/") for name in names.split(", ")]
        budgets |= dict(zip(each, (int(number.replace(",", "")) for number in numbers.split(", ")), strict=True))
    library = ROOT / "rrfp_jax"
    sizes = {path.name: 0 for path in library.iterdir() if path.is_dir() and next(path.rglob("*.py"), None)}
    sizes |= {"pipeline.py": 0, "modules beside the packages": 0}
    for path in library.rglob("*.py"):
        first = path.relative_to(library).parts[0]
        owner = first if first in sizes else "modules beside the packages"
        sizes[owner] += len(path.read_text(encoding="utf-8").splitlines())
    assert sizes.keys() == budgets.keys()
    assert {name: (size, budgets[name]) for name, size in sizes.items() if size > budgets[name]} == {}


def test_files_that_the_pages_name_exist() -> None:
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`((?:rrfp_jax|experiments|tests|tpu_gpu_configs)/[\w/.]+)`", page.read_text("utf-8"))
    }
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []


def test_pages_keep_their_length_and_plain_words() -> None:
    assert page_faults(ROOT) == []
