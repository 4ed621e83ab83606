"""How Sphinx builds the site: the pages of docs/ and the READMEs as they stand, and the public names from docstrings.

The sources are the whole checkout, so that links between pages, to source files and to pictures are the same here and
on a forge. `make docs` builds it; a link that leads nowhere is an error.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any, get_origin

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from sphinx.util.nodes import make_refnode  # noqa: E402

from rrfp_jax.first_use import FIELDS  # noqa: E402
from rrfp_jax.version import __version__  # noqa: E402 - the checkout's own

project, author, release = "RRFP for JAX", "The RRFP authors", __version__
project_copyright = author
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "docs/site/api/*.md"]
include_patterns += ["experiments/paper/*.md", "tpu_gpu_configs/README.md"]
exclude_patterns = [".*", "build", "dist", "requirements", "rrfp_jax", "runs", "tests", "*.egg-info"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_title = project
html_copy_source = html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

GROUPS = {
    "Start": [
        "docs/README",
        "docs/models",
        "docs/data",
        "docs/runs",
        "docs/trouble",
    ],
    "Pipelines": ["docs/orders", "docs/schedules", "docs/planning"],
    "Machines": ["docs/parallelism", "docs/elastic", "docs/accelerators", "docs/security", "tpu_gpu_configs/README"],
    "Inside": ["docs/architecture", "experiments/paper/README", "experiments/paper/schedules", "CHANGELOG"],
    "Python": [
        f"docs/site/api/{name}" for name in ("pipelines", "models", "data", "operations", "language", "testing")
    ],
}
"""What the sidebar shows; pages that are new come under "More" of themselves."""
_NAMES_OF = re.compile(r"^<!-- names of (\S+?)(?:, first ([\w ]+))? -->$", re.MULTILINE)


def setup(app: Any) -> None:
    """Hooks of this project."""
    app.connect("source-read", complete)
    app.connect("build-finished", begin_at_readme)
    app.connect("missing-reference", by_last_name)
    app.connect("autodoc-process-docstring", as_a_sentence, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", without_fields, priority=100)


def complete(_: Any, page: str, source: list[str]) -> None:
    """Give the first page the table of contents, and pages of the API their names."""
    if page == root_doc:
        source[0] += "".join(toctree(caption, pages) for caption, pages in groups().items())
    source[0] = _NAMES_OF.sub(lambda found: public_names(found[1], (found[2] or "").split()), source[0])


def groups() -> dict[str, list[str]]:
    """The groups of the sidebar with the pages that there are."""
    written = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    listed = {page for pages in GROUPS.values() for page in pages}
    return {**GROUPS, "More": sorted(written - listed)}


def toctree(caption: str, pages: list[str]) -> str:
    """A table of contents in MyST."""
    if not pages:
        return ""
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *(f"/{each}" for each in pages), "```", ""]
    )


def public_names(package: str, first: list[str]) -> str:
    """Directives for all that a package exports: these names, and the others in the order in which it has them."""
    stub = ROOT / package.replace(".", "/") / "__init__.pyi"
    text = (stub if stub.exists() else stub.with_suffix(".py")).read_text(encoding="utf-8")
    homes = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as \2$", text, re.MULTILINE)}
    directives = [f"{_directive(package, name, homes[name])}\n" for name in dict.fromkeys([*first, *homes])]
    return "\n".join(["```{eval-rst}", *directives, "```"])


def _directive(package: str, name: str, home: str) -> str:
    """Classes and functions have their docstrings with them, other values where they are written."""
    value = getattr(importlib.import_module(package), name)
    is_alias = get_origin(value) is not None
    kind = "data" if is_alias else "class" if isinstance(value, type) else "function" if callable(value) else "data"
    members = "\n   :members:" if kind == "class" else ""
    return f".. auto{kind}:: {home if kind == 'data' else package}.{name}{members}"


def by_last_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Docstrings name things where they live; the pages have them where they are exported."""
    last = str(node.get("reftarget", "")).rpartition(".")[2]
    found = [name for name in env.domains["py"].objects if name.rpartition(".")[2] == last] if last else []
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    page = env.domains["py"].objects[found[0]].docname
    return make_refnode(app.builder, node["refdoc"], page, found[0], contnode, found[0])


def as_a_sentence(_: Any, what: str, *rest: Any) -> None:
    """Napoleon takes what stands before a colon in the first line of a field's docstring for its type."""
    if what in ("attribute", "property"):
        rest[-1].insert(0, "")


def without_fields(_: Any, what: str, *rest: Any) -> None:
    """Leaves the fields out of a record's docstring: the page has each below the record."""
    lines = rest[-1]
    if what == "class" and FIELDS in lines:
        del lines[lines.index(FIELDS) :]


def begin_at_readme(app: Any, error: Exception | None) -> None:
    """The address without a page shows the first one."""
    if error is None and app.builder.name == "html":
        site = Path(app.outdir)
        (site / "index.html").write_text((site / f"{root_doc}.html").read_text(encoding="utf-8"), encoding="utf-8")
