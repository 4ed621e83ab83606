"""Pictures are the same every time, explain every colour, and keep their texts apart and inside."""

import time
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from rrfp_jax.observe.panels import panels
from rrfp_jax.observe.picture import draw_timelines, figure_of, idle_keys, share_images, task_keys
from rrfp_jax.observe.style import IDLE_LOOKS, TASK_LOOKS, UNEXPLAINED_LABEL, rgb
from rrfp_jax.schedules import BUILT_IN_KINDS, Task, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait
from tests.observe.conftest import SampleTimeline


def all_looks() -> Timeline:
    """Every kind and every reason once."""
    spans = [
        Span(0, 0, Task(kind, 0, -1 if kind in "RU" else 0), float(i), i + 1.0) for i, kind in enumerate(BUILT_IN_KINDS)
    ]
    waits = [Wait(0, 1, float(i), i + 1.0, reason) for i, reason in enumerate(IdleReason)]
    return Timeline(2, spans, waits)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_same_timeline_gives_the_same_bytes(suffix: str, sample: SampleTimeline, tmp_path: Path) -> None:
    timelines = [("one", sample(2, 4, jitter=0.3)), ("two", sample(3, 4, chunks_per_stage=2))]
    files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for file in files:
        draw_timelines(timelines, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_legend_names_every_colour_that_occurs() -> None:
    drawn = panels([("all", all_looks())])
    assert [key.label for key in task_keys(drawn)] == [TASK_LOOKS[kind].label for kind in BUILT_IN_KINDS]
    assert [key.label for key in idle_keys(drawn)] == [IDLE_LOOKS[reason].label for reason in IdleReason]
    texts = {text.get_text() for text in figure_of(drawn).findobj(Text)}
    assert {look.label for look in (*TASK_LOOKS.values(), *IDLE_LOOKS.values())} <= texts


def test_legend_names_no_task_that_nobody_can_see(sample: SampleTimeline) -> None:
    drawn = panels([("", sample(2, 4, durations_ms={"R": 1e-4}))])
    assert [key.label[0] for key in task_keys(drawn)] == ["F", "B", "U"]


def test_legend_names_no_colour_that_does_not_occur(sample: SampleTimeline) -> None:
    drawn = panels([("", sample(2, 4))])
    assert [key.label[0] for key in task_keys(drawn)] == ["F", "B", "R", "U"]
    assert IDLE_LOOKS[IdleReason.HOST].label not in {key.label for key in idle_keys(drawn)}


def test_timeline_without_reasons_says_so(sample: SampleTimeline) -> None:
    drawn = panels([("", Timeline(2, sample(2, 4).spans))])
    assert [key.label for key in idle_keys(drawn)] == [UNEXPLAINED_LABEL]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "options"),
    [
        (1, 1, {}),
        (4, 16, {"host_ms": 0.5, "jitter": 0.4, "fixed_order": True}),
        (8, 24, {"split": True}),
        (4, 8, {"chunks_per_stage": 4, "window": 5}),
        (16, 32, {"jitter": 0.3}),
        (8, 16, {"engines": True}),
        (24, 8, {"engines": True}),
    ],
)
def test_texts_stay_inside_and_apart(
    num_stages: int,
    num_microbatches: int,
    options: dict[str, object],
    sample: SampleTimeline,
    offloaded: SampleTimeline,
) -> None:
    caption = "A caption far too long for the line that it shares with the facts of the step " * 4
    given = dict(options)
    make = offloaded if given.pop("engines", False) else sample
    timelines = [(caption, make(num_stages, num_microbatches, **given)), ("$x_$ <b> & 100%", sample(2, 4))]
    figure = figure_of(panels(timelines))
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    # Words only: matplotlib also keeps labels of ticks outside of the axis, which it does not draw.
    texts = [t for t in figure.findobj(Text) if t.get_visible() and any(map(str.isalpha, t.get_text()))]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    whole = figure.bbox
    for text, box in boxes:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
    for (first, one), (second, other) in combinations(boxes, 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, (first, second)


def test_box_stands_where_its_task_ran(tmp_path: Path) -> None:
    timeline = Timeline(2, [Span(0, 0, Task(TaskKind.F, 0, 0), 5.0, 6.0), Span(0, 1, Task(TaskKind.B, 0, 0), 6.0, 7.0)])
    draw_timelines([("", timeline)], tmp_path / "picture.png")
    pixels = np.round(imread(tmp_path / "picture.png")[..., :3] * 255).astype(int)
    centres = {}
    for kind in (TaskKind.F, TaskKind.B):
        # Without the swatches of the legend, which stand in the lower half.
        rows, columns = np.nonzero((pixels[: len(pixels) // 2] == rgb(TASK_LOOKS[kind].colour)).all(axis=-1))
        centres[kind] = (rows.mean(), columns.mean())
    assert centres[TaskKind.F][0] < centres[TaskKind.B][0]
    assert centres[TaskKind.F][1] < centres[TaskKind.B][1]


@pytest.mark.slow
def test_very_many_tasks_become_shares(wide: SampleTimeline, tmp_path: Path) -> None:
    timeline = wide(64, 512)
    start = time.perf_counter()
    draw_timelines([("64 stages, 512 microbatches", timeline)], tmp_path / "wide.png")
    assert time.perf_counter() - start < 20
    (panel,) = panels([("", timeline)])
    images = share_images(panel, end_ms=panel.end_ms, num_columns=400, num_levels=10)
    assert [image.shape for image in images] == [(10, 400, 4)] * 64
    forward, backward = images[0][:, 50], images[0][:, 300]
    assert {tuple(pixel) for pixel in forward} == {(*rgb(TASK_LOOKS[TaskKind.F].colour), 255)}
    halves = [tuple(rgb(TASK_LOOKS[kind].colour)) for kind in (TaskKind.W, TaskKind.I)]
    assert tuple(backward[0][:3]) == halves[0]
    assert tuple(backward[-1][:3]) == halves[1]
    # The last stage waits first: nothing there hides the idle time behind.
    assert (images[63][:, 2, 3] == 0).all()


def test_engines_have_thin_rows_under_their_stage(offloaded: SampleTimeline) -> None:
    timeline = offloaded(4, 8)
    drawn = panels([("", timeline)])
    rows = drawn[0].rows
    lanes = ("compute", "d2h", "h2d")
    assert [(row.stage, row.lane) for row in rows] == [*product((0, 1), lanes), (2, "compute"), (3, "compute")]
    assert all(below.top == row.top + row.height for row, below in pairwise(rows))
    busy_s = sum(span.end_s - span.start_s for span in timeline.beside() if (span.stage, span.lane) == (0, "d2h"))
    assert drawn[0].idle_shares[1] == pytest.approx(1 - busy_s / timeline.makespan_s())
    figure = figure_of(drawn)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert {"d2h", "h2d", "O: operation on d2h", "L: operation on h2d", "S: operation"} <= set(texts)
    # Every number of a copy stands in the middle of its box.
    places = {text.get_position() for text in figure.findobj(Text) if text.get_text() == "3"}
    for span in timeline.beside():
        if span.task.microbatch == 3:
            row = next(row for row in rows if (row.stage, row.lane) == (span.stage, span.lane))
            middle = ((span.start_s + span.end_s) * 500, row.middle)
            assert any(place == pytest.approx(middle) for place in places), span


def test_engines_that_are_too_thin_become_shares(offloaded: SampleTimeline) -> None:
    (panel,) = panels([("", offloaded(4, 300))])
    images = share_images(panel, end_ms=panel.end_ms, num_columns=400, num_levels=20)
    assert [image.shape[0] for image in images] == [20, 9, 9, 20, 9, 9, 20, 20]
    shown = {tuple(pixel) for pixel in images[1].reshape(-1, 4) if pixel[3]}
    kind = next(group for group in panel.tasks if group.kind == "O")
    assert shown == {(*rgb(panel.colour(kind)), 255)}


@pytest.mark.parametrize("name", ["picture.jpg", "picture", "picture.pdf"])
def test_other_formats_are_refused(name: str, sample: SampleTimeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end in \.png or \.svg"):
        draw_timelines([("", sample(2, 2))], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_empty_timeline_leaves_the_old_picture(sample: SampleTimeline, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw_timelines([("", sample(2, 2))], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="'nothing' holds no task"):
        draw_timelines([("nothing", Timeline(2))], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_tasks_without_length_can_be_drawn(tmp_path: Path) -> None:
    timeline = Timeline(1, [Span(0, 0, Task(TaskKind.F, 0, 0), 1.0, 1.0)])
    draw_timelines([("instant", timeline)], tmp_path / "instant.png")
