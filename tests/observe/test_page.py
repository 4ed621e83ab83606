"""The page: self-contained, escaped, and alive in a real browser."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.observe.panels import facts, panels, write_page
from rrfp_jax.observe.style import IDLE_LOOKS, TASK_LOOKS
from rrfp_jax.schedules import TaskKind
from rrfp_jax.schedules.timeline import Timeline
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
window.addEventListener("load", async () => {
  const pause = () => new Promise((resolve) => setTimeout(resolve, 200));
  while (!panels.at(-1)?.shown) await pause();
  await pause();
  const select = document.getElementById("step"), tip = document.getElementById("tip");
  const move = (kind, panel, ms, stage) => {
    const place = panel.canvas.getBoundingClientRect(), wide = place.width - LEFT - RIGHT;
    const x = place.left + LEFT + (ms - view.from) / (view.to - view.from) * wide;
    const y = place.top + (stage + 0.5) * panel.row;
    panel.canvas.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: y, bubbles: true }));
  };
  const colours = (panel) => {
    const { width, height } = panel.canvas, seen = {};
    const { data } = panel.canvas.getContext("2d").getImageData(0, 0, width, height);
    for (let i = 0; i < data.length; i += 4) {
      const colour = "#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join("");
      seen[colour] = (seen[colour] ?? 0) + 1;
    }
    return Object.keys(seen).filter((colour) => seen[colour] > 40);
  };
  const facts = () => panels.map((panel) => panel.heading.textContent);
  const found = {
    legend: [...document.querySelectorAll("#legend > span")].map((entry) => entry.textContent.trim()),
    captions: [...document.querySelectorAll("h2")].map((heading) => heading.firstChild.textContent.trim()),
    steps: [...select.options].map((option) => option.value),
    opened: select.value,
    facts: facts(),
    boxes: panels.map((panel) => panel.shown.length),
    colours: panels.map(colours),
    resources: performance.getEntriesByType("resource").map((entry) => entry.name),
    title: document.title,
    whole: view.to,
  };
  move("pointermove", panels[0], HOVER, 0);
  found.hover = tip.hidden ? null : tip.textContent;
  if (ENGINE_ROW) {
    const engine = panels[0].rows[ENGINE_ROW];
    const copies = panels[0].shown.filter((box) => box.row === engine);
    const middle = (copies[1].start + copies[1].end) / 2 - panels[0].zero;
    move("pointermove", panels[0], middle, engine.top + engine.height / 2 - 0.5);
    found.engine = { text: tip.textContent, row: engine, copies: copies.length };
  }
  move("pointerdown", panels[0], 5, 0);
  move("pointermove", panels[0], 25, 0);
  move("pointerup", panels[0], 25, 0);
  found.zoomed = [view.from, view.to];
  panels[0].canvas.dispatchEvent(new MouseEvent("dblclick"));
  found.again = [view.from, view.to];
  select.value = select.options[0].value;
  select.onchange();
  found.first = facts();
  select.value = select.options[select.options.length - 1].value;
  select.onchange();
  found.last = { facts: facts(), boxes: panels.map((panel) => panel.shown.length) };
  panels[0].box.click();
  found.hidden = panels.map((panel) => panel.body.hidden);
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
</script></body>"""


def visit(page: Path, tmp_path: Path, *, hover_ms: float, engine_row: int = 0) -> dict[str, Any]:
    """Open a copy of the page with a probe in it; what the probe found, and what the console said."""
    probed = tmp_path / "probed.html"
    probe = PROBE.replace("HOVER", str(hover_ms)).replace("ENGINE_ROW", str(engine_row))
    probed.write_text(page.read_text().replace("</body>", probe))
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


def num_boxes(timeline: Timeline) -> int:
    return len(timeline.spans) + sum(wait.end_s > wait.start_s for wait in timeline.waits)


@pytest.mark.browser
@needs_browser
def test_page_lives_in_a_browser(sample: SampleTimeline, tmp_path: Path) -> None:
    steps = [sample(4, 8, jitter=0.4, host_ms=0.5, step=step, start_s=step * 0.5) for step in (3, 4)]
    both = Timeline(4)
    for step in steps:
        both.extend(step)
    write_page(
        [("fixed order", sample(4, 8, fixed_order=True, host_ms=0.5, step=4)), (NASTY, both)], tmp_path / "a.html"
    )
    found = visit(tmp_path / "a.html", tmp_path, hover_ms=2.0)
    assert found["console"] == []
    assert found["resources"] == []
    assert found["title"] == "Pipeline timelines"
    assert found["captions"] == ["fixed order", " ".join(NASTY.split())]
    assert found["legend"][:4] == [TASK_LOOKS[kind].label for kind in TASK_LOOKS if kind in "FBRU"]
    assert f"idle: {IDLE_LOOKS['fill'].label}" in found["legend"]
    assert {TASK_LOOKS["F"].colour, TASK_LOOKS["B"].colour, IDLE_LOOKS["drain"].fill} <= set(found["colours"][1])
    assert (found["steps"], found["opened"]) == (["3", "4", "all"], "4")
    assert found["boxes"][1] == num_boxes(steps[1])
    assert found["facts"][1] == facts(steps[1])
    assert re.fullmatch(
        r"F: forward\ntask 0F0: chunk 0, microbatch 0\nstage 0, step 4\n0\.500 to .* ms", found["hover"]
    )
    assert found["zoomed"] == pytest.approx([5, 25], abs=0.5)
    assert found["again"] == [0, found["whole"]]
    assert found["first"] == ["has no such step", facts(steps[0])]
    assert found["last"]["facts"][1].startswith("steps 3 to 4, mean: ")
    assert found["last"]["boxes"][1] == num_boxes(both)
    assert found["hidden"] == [True, False]


@pytest.mark.browser
@needs_browser
def test_page_of_many_boxes_lives_in_a_browser(wide: SampleTimeline, tmp_path: Path) -> None:
    write_page([("many", wide(16, 300))], tmp_path / "page.html")
    found = visit(tmp_path / "page.html", tmp_path, hover_ms=100.5)
    assert found["console"] == []
    assert found["boxes"] == [num_boxes(wide(16, 300))]
    assert found["hover"].startswith("F: forward\ntask 0F")


@pytest.mark.browser
@needs_browser
def test_engines_live_in_a_browser(offloaded: SampleTimeline, tmp_path: Path) -> None:
    timeline = offloaded(4, 8)
    write_page([("", timeline)], tmp_path / "page.html")
    found = visit(tmp_path / "page.html", tmp_path, hover_ms=2.0, engine_row=2)
    assert found["console"] == []
    assert found["boxes"] == [num_boxes(timeline)]
    engine = found["engine"]
    assert (engine["row"]["stage"], engine["row"]["lane"], engine["copies"]) == (0, "h2d", 8)
    where = "task 0L1: chunk 0, microbatch 1\nstage 0, engine h2d, step 0\n"
    assert engine["text"].startswith(f"L: operation on h2d\n{where}")
    assert {"O: operation on d2h", f"idle: {IDLE_LOOKS['engine'].label}"} <= set(found["legend"])
    (panel,) = panels([("", timeline)])
    assert {panel.looks[TaskKind(kind)].colour for kind in "FBLO"} <= set(found["colours"][0])


def test_every_hatching_is_drawn_by_the_page() -> None:
    script = (resources.files("rrfp_jax.observe") / "page.html").read_text(encoding="utf-8")
    lines = re.search(r"const LINES = \{(.*?)\};", script)
    assert lines is not None
    drawn = {key.strip('"').replace("\\\\", "\\") for key in re.findall(r'("[^"]+"|\w+): \[', lines[1])}
    drawn |= set(re.findall(r'look\.pattern === "(.)"', script))
    assert {look.pattern for look in IDLE_LOOKS.values()} <= drawn


def test_page_needs_nothing_from_elsewhere(sample: SampleTimeline, tmp_path: Path) -> None:
    write_page([(NASTY, sample(2, 4))], tmp_path / "page.html", title="a <title>")
    text = (tmp_path / "page.html").read_text()
    assert "<title>a &lt;title&gt;</title>" in text
    assert NASTY not in text
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text
    assert not re.search(r"@[A-Z]+@", text)
    assert len(text) < 20_000


def test_same_timeline_gives_the_same_page(sample: SampleTimeline, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_page([("", sample(2, 4, jitter=0.3))], tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_empty_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task"):
        write_page([("x", Timeline(2))], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
