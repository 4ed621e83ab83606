"""The page: self-contained, escaped, and alive in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.observe.page import write_page
from rrfp_jax.observe.style import IDLE_LOOKS, TASK_LOOKS
from rrfp_jax.timeline import Timeline
from tests.observe.conftest import SampleTimeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
    "--enable-logging=stderr",
]
NASTY = "</script><script>document.title='taken'</script> <b>bold</b> & \"quotes\" $x^2$"

PROBE = """<script>
window.addEventListener("load", () => setTimeout(async () => {
  const plot = document.getElementById("timelines");
  const pause = () => new Promise((resolve) => setTimeout(resolve, 300));
  const found = {
    groups: [...new Set(plot.data.map((trace) => trace.legendgroup))],
    legend: [...document.querySelectorAll(".legendtext")].map((text) => text.textContent),
    bars: document.querySelectorAll(".bars .point path").length,
    numbers: [...document.querySelectorAll(".bars .point text")].map((text) => text.textContent),
    captions: [...document.querySelectorAll(".annotation-text")].map((text) => text.textContent),
    resources: performance.getEntriesByType("resource").map((entry) => entry.name),
    title: document.title,
  };
  Plotly.Fx.hover(plot, {xval: XVAL, yval: 0}, "xy");
  await pause();
  found.hover = [...document.querySelectorAll(".hoverlayer .hovertext")].map((text) => text.textContent);
  await Plotly.relayout(plot, {"xaxis.range": [5, 25]});
  const layout = plot._fullLayout;
  found.ranges = Object.keys(layout).filter((key) => /^xaxis[0-9]*$/.test(key)).map((key) => layout[key].range);
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}, 500));
</script></body>"""


def visit(page: Path, tmp_path: Path, *, hover_ms: float) -> dict[str, Any]:
    """Open a copy of the page with a probe in it; what the probe found, and what the console said."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE.replace("XVAL", str(hover_ms))))
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(text), "console": console}


@pytest.mark.browser
@needs_browser
def test_page_lives_in_a_browser(sample: SampleTimeline, tmp_path: Path) -> None:
    timelines = [
        ("fixed order", sample(4, 8, fixed_order=True, jitter=0.4, host_ms=0.5)),
        (NASTY, sample(4, 8, jitter=0.4, host_ms=0.5)),
    ]
    write_page(timelines, tmp_path / "page.html")
    found = visit(tmp_path / "page.html", tmp_path, hover_ms=2.0)
    assert found["console"] == []
    assert found["resources"] == []
    assert found["title"] == "Pipeline timelines"
    assert set(found["groups"]) == {*"FBRU", "fill", "input", "order", "window", "drain", "host"}
    assert found["legend"][:4] == [TASK_LOOKS[kind].label for kind in TASK_LOOKS if kind in "FBRU"]
    assert found["bars"] >= sum(len(timeline.spans) + len(timeline.waits) for _, timeline in timelines)
    assert {str(microbatch) for microbatch in range(8)} <= set(found["numbers"])
    assert "fixed order" in found["captions"]
    assert NASTY in found["captions"]
    (hover,) = found["hover"]
    assert re.fullmatch(r"F: forwardtask 0F0: chunk 0, microbatch 0stage 0, step 00\.500 to .* ms: .* ms", hover)
    assert found["ranges"] == [[5, 25], [5, 25]]


@pytest.mark.browser
@needs_browser
def test_page_of_many_boxes_lives_in_a_browser(wide: SampleTimeline, tmp_path: Path) -> None:
    write_page([("many", wide(16, 300))], tmp_path / "page.html")
    found = visit(tmp_path / "page.html", tmp_path, hover_ms=100.5)
    assert found["console"] == []
    assert found["resources"] == []
    assert set(found["groups"]) == {*"FIW", "fill", "input", "drain"}
    assert found["hover"][0].startswith("F: forwardtask 0F")


def test_page_needs_nothing_from_elsewhere(sample: SampleTimeline, tmp_path: Path) -> None:
    write_page([(NASTY, sample(2, 4))], tmp_path / "page.html", title="a <title>")
    text = (tmp_path / "page.html").read_text()
    assert "<title>a &lt;title&gt;</title>" in text
    assert NASTY not in text
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text
    assert IDLE_LOOKS["window"].label in text
    assert len(text) < 8e6


def test_same_timeline_gives_the_same_page(sample: SampleTimeline, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_page([("", sample(2, 4, jitter=0.3))], tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_empty_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task"):
        write_page([("x", Timeline(2))], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
