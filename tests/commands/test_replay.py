"""The replay command: verdict, story, wait-for graph, pictures, JSON and refusals, on logs of the real runtime."""

import gzip
import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.commands import replay
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Agreement, Message, StepRules
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime import NoProgress, PipelineRuntime, TaskFailed
from rrfp_jax.runtime.event_log import log_name, take_log, write_log
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome
from rrfp_jax.schedules import Task
from rrfp_jax.testing import emulate
from tests.commands.running import run_command, sentence
from tests.runtime.logged_runs import LoggedRun, arbiter_of

NUM_STAGES, NUM_MICROBATCHES = 3, 4
RULES = StepRules(updates=False, agreement=Agreement.ALL)


@pytest.mark.parametrize(
    "order",
    [
        {"hint": "bf", "window": 2},
        {"hint": "bfw", "window": 1},
        {"hint": "f-priority", "window": (3, 2, 1)},
        {"schedule": "1f1b", "consume": "strict"},
        {"schedule": "zb-h1"},
    ],
)
def test_emulated_runs_replay_and_their_timeline_is_that_of_the_run(
    order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = OrderingOptions(**order).resolve(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    durations = np.full((1, NUM_STAGES, NUM_MICROBATCHES, 3), 0.5)
    emulation = emulate(resolved.arbiters(RULES), durations, 3)
    write_log(take_log(emulation.logs), tmp_path / log_name())
    assert replay.main([str(tmp_path), "--trace", str(tmp_path / "trace.json"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["is_same"] is True
    assert figures["num_events"] == sum(len(s.entries) for log in emulation.logs.values() for s in log.segments)
    assert [stage["step"] for stage in figures["stages"]] == [2] * NUM_STAGES
    boxes = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e.get("cat", "").startswith("task")
    ]
    ran = {(span.step, str(span.task)): span for span in emulation.timeline.spans}
    assert len(boxes) == len({(box["args"]["step"], box["name"]) for box in boxes}) >= 2 * NUM_STAGES * NUM_MICROBATCHES
    for box in boxes:
        span = ran[box["args"]["step"], box["name"]]
        assert box["dur"] * 1e-6 == pytest.approx(span.end_s - span.start_s, abs=0.05)


class StuckStage:
    """An executor whose task of one microbatch never returns, or raises."""

    hands_ahead = False

    def __init__(self, stage: int, how: str) -> None:
        self.stage, self.how, self.free = stage, how, threading.Event()

    def begin(self, step: int, batch: Any, graph: Any) -> None: ...

    def launch(self, step: int, task: Task) -> Launched:
        return Launched(time.perf_counter(), partial(self.wait, step, task))

    def wait(self, step: int, task: Task) -> None:
        if (self.stage, step, str(task)) == (1, 1, "1F2"):
            if self.how == "fails":
                raise RuntimeError("broken arithmetic")
            self.free.wait()

    def payload(self, step: int, message: Message) -> Any: ...

    def accept(self, step: int, message: Message, payload: Any) -> None: ...

    def finish(self, step: int) -> StageOutcome:
        return StageOutcome()


class Direct:
    def __init__(self, deliver: Any, failed: Any) -> None:
        self._deliver = deliver

    def send_array(self, payload: Any, stage: int, message: Message) -> Any:
        return payload

    def close(self) -> None:
        pass

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._deliver(stage, step, message, payload)


@pytest.fixture
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The log of a run of which stage 1 is stuck in 1F2 of step 1."""
    stages = [StuckStage(stage, request.param) for stage in range(NUM_STAGES)]
    arbiters = [arbiter_of(stage, num_microbatches=NUM_MICROBATCHES) for stage in range(NUM_STAGES)]
    runtime = PipelineRuntime(arbiters, lambda stage, _: stages[stage], Direct, RuntimeOptions(progress_deadline_s=0.3))
    assert runtime.submit(0, StepBatch()).result().step == 0
    with pytest.raises((NoProgress, TaskFailed)):
        runtime.submit(1, StepBatch()).result()
    write_log(runtime.event_log(), tmp_path / log_name())
    for stage in stages:
        stage.free.set()
    runtime.close()
    return tmp_path / log_name()


@pytest.mark.parametrize("stuck", ["hangs"], indirect=True)
def test_a_hung_run_is_told_to_its_end(stuck: Path, tmp_path: Path) -> None:
    picture = tmp_path / "t.png"
    result = run_command("replay", stuck, "--microbatch", 2, "--timeline", picture)
    assert result.returncode == 0, result.stderr
    assert "every instruction is the same as in the run" in result.stdout
    assert "no task finished for 0.3 s (progress deadline 0.3 s)" in result.stdout
    assert "stage 1 has been running 1F2 for 0." in result.stdout
    assert "2F2 waits for the activation of microbatch 2 from chunk 1 to chunk 2 (stage 1)" in result.stdout
    assert "all stages that wait do so, directly or not, for stage 1" in result.stdout
    story = result.stdout.split("microbatch 2 in step 1 on stage 1:")[1].split("microbatch 2 in step 1 on stage 2:")[0]
    lines = [line.split("ms  ")[-1].strip() for line in story.splitlines() if line.strip()]
    assert lines == [
        "the activation of microbatch 2 from chunk 0 to chunk 1 arrived",
        "1F2 was dispatched",
        "at the end:",
        "1F2 is running",
        "1B2 waits for gradient of microbatch 2 from chunk 2 to chunk 1, 1F2",
    ]
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("stuck", ["fails"], indirect=True)
def test_a_failed_task_is_named(stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(stuck), "--json", "--microbatch", "-1", "--stage", "2", "--step", "0"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert "1F2 on stage 1 failed: RuntimeError: broken arithmetic" in figures["report"]["summary"]
    assert [state["failed"] for state in figures["report"]["stages"]] == [False, True, False]
    (part,) = figures["story"]
    assert (part["stage"], part["step"], part["at_the_end"]) == (2, 0, ["step 0 had ended here"])
    assert {event["what"] for event in part["events"]} == {
        "the verdict from stage 0 to stage 2 arrived",
        "the report from stage 2 to stage 0 was sent",
    }


def write_logs(folder: Path, *, num_events: int = 50) -> LoggedRun:
    """The logs of a run of three processes."""
    run = LoggedRun({(s, 0): arbiter_of(s) for s in range(3)}).start(2).run(num_events)
    for rank in range(3):
        log = take_log({rank: run.logs[rank, 0]}, rank=rank, taken_s=run.now_s)
        write_log(log, folder / log_name(rank, 3))
    return run


def test_a_run_directory_holds_the_logs_of_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_logs(tmp_path)
    assert replay.main([str(tmp_path), "--microbatch", "0", "--stage", "1"]) == 0
    together = capsys.readouterr().out
    assert "50 events of 3 stages from 3 processes replayed" in together
    assert "microbatch 0 in step 1 on stage 1 (rank 1)" in together
    assert "rank 2: stage 2" in together
    assert replay.main([str(path) for path in sorted(tmp_path.iterdir())] + ["--microbatch", "0", "--stage", "1"]) == 0
    assert capsys.readouterr().out == together


def test_a_difference_ends_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_logs(tmp_path)
    path = tmp_path / log_name(2, 3)
    text = gzip.decompress(path.read_bytes()).decode()
    path.write_bytes(gzip.compress(text.replace('["RunTask",1,"2F0"]', '["RunTask",1,"2F1"]').encode()))
    assert replay.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "the core answers otherwise than in the run, first here:\nstage 2, event" in told
    assert "recorded: 2F1 was dispatched\n  replayed: 2F0 was dispatched" in told
    assert replay.main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["is_same"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--microbatch", 3), "choose 0 to 2"),
        (("--microbatch", -2), "choose 0 to 2"),
        (("--microbatch", 0, "--stage", 3), "choose 0, 1, 2"),
        (("--microbatch", 0, "--step", 9), "step 9 is not in these logs: choose 0, 1"),
        (("--stage", 1), "give --microbatch too"),
        (("--timeline", "t.gif"), "end in .png, .svg or .html"),
        (("missing.json.gz",), "No such file"),
        (("README.md",), "is no event log"),
        (("docs",), "holds no event log"),
        (("{log}",), "two logs are of rank 0"),
    ],
)
def test_bad_input_is_refused(options: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    write_logs(tmp_path)
    words = [str(option).format(log=tmp_path / log_name(0, 3)) for option in options]
    if message.startswith("two logs"):
        (tmp_path / "events-more.json.gz").write_bytes((tmp_path / log_name(0, 3)).read_bytes())
    with pytest.raises(BadInput, match=message):
        replay.main([str(tmp_path), *words])


def test_a_log_without_a_task_has_no_timeline(tmp_path: Path) -> None:
    write_log(take_log({1: LoggedRun({(1, 0): arbiter_of(1)}).start(1).run().logs[1, 0]}), tmp_path / log_name())
    with pytest.raises(BadInput, match="leave --timeline and --trace out"):
        replay.main([str(tmp_path), "--timeline", str(tmp_path / "t.png")])


def test_the_command_refuses_in_one_sentence_and_loads_no_jax(tmp_path: Path) -> None:
    write_logs(tmp_path)
    cut = tmp_path / log_name(1, 3)
    cut.write_bytes(cut.read_bytes()[:200])
    assert "is damaged or cut short" in sentence(run_command("replay", tmp_path))
    program = (
        "import sys; from rrfp_jax.commands import replay; replay.main(sys.argv[1:]); assert 'jax' not in sys.modules"
    )
    arguments = [sys.executable, "-c", program, tmp_path / log_name(0, 3), "--timeline", tmp_path / "t.html"]
    subprocess.run(arguments, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    assert (tmp_path / "t.html").stat().st_size > 1000


def test_a_rule_that_a_log_names_is_run_only_where_the_command_line_names_its_file(tmp_path: Path) -> None:
    """A log comes with a folder that somebody sends; the path in it may lead to anything."""
    (tmp_path / "rules.py").write_text(
        "from rrfp_jax.schedules.language import B, F, W, rule, turns\nmine = rule(turns(B, F), W)\n"
    )
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')\n")
    resolved = OrderingOptions(hint=f"{tmp_path}/rules.py:mine", window=2).resolve(num_stages=2, num_microbatches=4)
    emulation = emulate(resolved.arbiters(RULES), np.full((1, 2, 4, 3), 0.5), 1)
    log = tmp_path / log_name()
    write_log(take_log(emulation.logs), log)
    content = gzip.decompress(log.read_bytes()).replace(b"rules.py:mine", b"theirs.py:mine")
    log.write_bytes(gzip.compress(content))
    with pytest.raises(
        BadInput, match=r"theirs.py:mine', a rule in a file, .* name the file yourself, with --rules FILE"
    ):
        replay.main([str(log)])
    assert replay.main([str(log), "--rules", f"{tmp_path}/rules.py"]) == 0
    with pytest.raises(BadInput, match="it ran"):
        replay.main([str(log), "--rules", f"{tmp_path}/theirs.py"])
