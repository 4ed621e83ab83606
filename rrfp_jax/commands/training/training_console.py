"""The output of a training run: the progress of compiling, the stages, and the steps, as one bar or as lines."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.core import Order
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.readable import format_bytes
from rrfp_jax.training.evaluation import EvaluationRow
from rrfp_jax.training.loop import StepRow

_LINE = (
    "step {step:5d}  loss {loss:7.4f}  grad norm {norm:>8}  lr {rate:.2e}  {ms:7.1f} ms  {speed:9,.0f} tokens/s  "
    "{images}bubble {bubble:>5}{note}"
)
_COLUMN_GAP = 3
"""Between two columns of a table, in characters."""
_LINE_EVERY_S = 10.0
"""How often a line tells of progress where no bar can be drawn."""


def _percent(part: float | None, places: int) -> str:
    return "-" if part is None else f"{part:.{places}%}"


class CompileReport:
    """Tells how far compiling has come: by a bar on a terminal, elsewhere by a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console, self._started_s, self._told_s = console, time.monotonic(), 0.0
        self._bar = Progress(
            TextColumn("compiling or loading {task.total} programs"),
            BarColumn(),
            TextColumn("{task.completed} done"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )

    def __call__(self, done: int, total: int) -> None:
        if not self._bar.tasks:
            self._bar.add_task("compiling", total=total)
            self._bar.start()
        self._bar.update(self._bar.tasks[0].id, completed=done)
        now_s = time.monotonic()
        if done == total:
            self._bar.stop()
            self._console.print(f"the stages' {total} programs were ready after {now_s - self._started_s:.0f} s")
        elif self._bar.disable and now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            self._console.print(f"compiling or loading {total} programs ({done} done)")

    def stop(self) -> None:
        self._bar.stop()


class TrainingConsole:
    """Prints to stdout, unless it is quiet: on a terminal one bar that tells of the last step, elsewhere lines."""

    def __init__(self, num_steps: int, *, report_every: int = 1, is_quiet: bool = False) -> None:
        self._num_steps, self._report_every = num_steps, report_every
        self._console = make_console(is_quiet=is_quiet)
        self._has_bar = self._console.is_terminal and not is_quiet
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            # Not up to the edge: the echo of Ctrl-C would begin a line of its own there, and the bar stay.
            BarColumn(bar_width=max(4, min(40, self._console.width - 72))),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._has_bar,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=num_steps, start=False, told="")
        self._first: StepRow | None = None
        self._last: StepRow | None = None
        self._stages_with_foresight, self._saw_images = 0, False

    @contextmanager
    def compiling(self) -> Iterator[CompileReport]:
        """Yields the report of compiling, to be called with the number of programs compiled so far and of all."""
        report = CompileReport(self._console)
        try:
            yield report
        finally:
            report.stop()

    def speak(self) -> None:
        """Is quiet no more, and prints lines."""
        self._console.quiet = False

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, markup=False, soft_wrap=not self._has_bar)

    def show_stages(
        self, pipeline: Pipeline, order: Order | None = None, forecast: Sequence[StageForecast] | None = None
    ) -> None:
        """Print the stages, every replica of them, with their contents and their bounds on work in flight.

        ``order`` and ``forecast`` are those of a pipeline that does not run.
        """
        order, forecast = order or pipeline.order, forecast or pipeline.forecast
        num_params, layout = pipeline.num_params(), pipeline.layout
        self._stages_with_foresight = 0 if order.foresight is None else layout.num_units
        on_host = ["on host"] * any(each.host_peak for each in forecast)
        differs = ["remat"] * (len({*pipeline.remat}) > 1)
        rows = [("stage", "devices", "layers", "parameters", "may hold", "peak memory", *on_host, *differs)]
        for unit in (each for each in range(layout.num_units) if each not in layout.absent):
            stage, numbers = layout.stage_of(unit), layout.devices_of(unit)
            devices = f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
            if pipeline.process.is_here:
                devices = ", ".join(map(str, pipeline.process.devices_of(unit)))
                if layout.num_ranks > 1:  # where each has its own JAX, all of them call their first device 0
                    devices = f"{name_ranks(layout.ranks_of(unit))}: {devices}"
            chunks = pipeline.placement.chunks_of_stage[stage]
            rows.append(
                (
                    str(stage) if layout.data == 1 else f"{stage}, replica {layout.replica_of(unit)}",
                    devices,
                    _contents(pipeline, order, stage),
                    f"{num_params[stage]:,}",
                    order.bounds[unit],
                    format_bytes(forecast[unit].peak),
                    *[format_bytes(forecast[unit].host_peak) for _ in on_host],
                    *[", ".join(dict.fromkeys(str(pipeline.remat[c]) for c in chunks)) for _ in differs],
                )
            )
        table = make_table("stages", *rows[0])
        for row in rows[1:]:
            table.add_row(*row)
        for column in table.columns[3:]:
            column.justify, column.no_wrap = "right", True
        if self._has_bar:
            # On a terminal only the names of layers are shortened, numbers never.
            layers, others = table.columns[2], [max(map(len, cells)) for cells in zip(*rows, strict=True)]
            taken = sum(others) - others[2] + _COLUMN_GAP * len(others)
            layers.no_wrap, layers.overflow = True, "ellipsis"
            layers.max_width = max(8, self._console.width - taken)
        self._console.print(table)

    def show_step(self, row: StepRow) -> None:
        if self._first is None:
            self._first = row
            self._progress.reset(self._task, completed=row.step)
        self._last = row
        told = f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tokens/s  bubble {_percent(row.bubble_fraction, 0)}"
        self._progress.update(self._task, advance=1, told=told)
        if self._has_bar:
            if row.skipped:
                self.say(f"step {row.step}: no update, because {row.fault or 'loss or gradients were not finite'}")
        elif not row.step % self._report_every or row.step == self._num_steps - 1 or row.skipped:
            self.say(self._line(row))

    def show_evaluation(self, row: EvaluationRow) -> None:
        per_byte = "" if row.bits_per_byte is None else f"  {row.bits_per_byte:.4f} bits/byte"
        exact = "" if row.exact_match is None else f"  exact match {row.exact_match:.1%}"
        when = "before the first step" if row.step < 0 else f"after step {row.step}"
        self.say(
            f"{row.evaluation} {when}: loss {row.loss:.4f}  perplexity {row.perplexity:.4g}{per_byte}{exact}  "
            f"({row.tokens:,.0f} tokens in {row.seconds:.1f} s)"
        )

    def _line(self, row: StepRow) -> str:
        self._saw_images |= row.images_per_s > 0
        ahead, skipped = self._stages_with_foresight, f"  skipped: {row.fault or 'not finite'}" if row.skipped else ""
        return _LINE.format(
            step=row.step,
            loss=row.loss,
            norm="-" if row.grad_norm is None else f"{row.grad_norm:.3f}",
            rate=row.learning_rate,
            ms=row.step_time_s * 1e3,
            speed=row.tokens_per_s,
            images=f"{row.images_per_s:7,.0f} images/s  " if self._saw_images else "",
            bubble=_percent(row.bubble_fraction, 1),
            note=(f"  ahead {row.looking_ahead}/{ahead}" if ahead else "") + skipped,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Takes the bar away; its last message stays as a line."""
        self._progress.stop()
        if self._has_bar and self._first is not None and self._last is not None:
            self.say(
                f"steps {self._first.step} to {self._last.step}: "
                f"the loss went from {self._first.loss:.4f} to {self._last.loss:.4f}"
            )


def _contents(pipeline: Pipeline, order: Order, stage: int) -> str:
    """Returns the layers of a stage, and in how many slices sequences run through its chunks."""
    graph, parts = order.graph, []
    for chunk in pipeline.placement.chunks_of_stage[stage]:
        passes = graph.passes_of(chunk * graph.num_replicas)
        name, is_slice, _ = pipeline.chunks[chunk].name.partition(" (slice")
        if not is_slice:
            parts.append(name)
        elif passes[0] == chunk * graph.num_replicas:
            parts.append(f"{name} in {len(passes)} slices")
    return "; ".join(parts)
