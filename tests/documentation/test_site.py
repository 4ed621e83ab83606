"""The site builds without a warning, and has every page and every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT
from tests.environment import of_child


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_all_pages_and_names(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="make docs installs what builds the site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", ".", tmp_path],
        cwd=ROOT,
        env=of_child() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="docs/{page.stem}.html"' in first
    names = re.findall(r" as (\w+)$", (ROOT / "rrfp_jax" / "__init__.pyi").read_text(), re.MULTILINE)
    api = (tmp_path / "docs" / "site" / "api" / "pipelines.html").read_text()
    assert [name for name in names if f'id="rrfp_jax.{name}"' not in api and name != "__version__"] == []
    runs = (tmp_path / "docs" / "runs.html").read_text()
    assert 'href="#the-same-bits"' in runs


@pytest.mark.slow
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="make docs installs what builds the site")
    (tmp_path / "README.md").write_text("# One\n\n[two](docs/two.md#nowhere) and [three](three.md)\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "two.md").write_text("# Two\n")
    options = [f"-D{setting}" for setting in ("extensions=myst_parser", "root_doc=README", "myst_heading_anchors=4")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-C", *options, tmp_path, tmp_path / "out"],
        env=of_child(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert "three.md" in done.stderr
