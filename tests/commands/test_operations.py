"""simulate, emulate and levels of a schedule that brings operations."""

import json

import pytest

from experiments import levels
from rrfp_jax.commands import simulate
from rrfp_jax.commands.common import ordering
from rrfp_jax.schedules import build_schedule, formulas, with_operations
from tests.commands.running import run_command
from tests.runtime.operations.test_operations import offload

SIZES = ("--num-stages", "4", "--num-microbatches", "12")
STRICT = ("--schedule", "1f1b", "--consume", "strict")


@pytest.fixture
def offloading(monkeypatch):
    """``offloading(ms)``: every schedule moves the activations of the first stage to the host and back."""

    def set_up(ms: float, *, lanes=("d2h", "h2d"), lead=1, module=ordering):
        def build(name, request):
            table = build_schedule(name, request)
            pairs = frozenset((0, m) for m in range(request.num_microbatches))
            return with_operations(table, offload(pairs, ms=ms, lanes=lanes, lead=lead))

        monkeypatch.setattr(module, "build_schedule", build)

    return set_up


@pytest.fixture
def output(capsys):
    """Run a command; what it printed, as JSON or as one line of words."""

    def run(main, *arguments: str) -> dict | str:
        assert main([*arguments]) == 0
        text = capsys.readouterr().out
        return json.loads(text.splitlines()[-1]) if "--json" in arguments else " ".join(text.split())

    return run


def test_simulate_tells_what_moved_and_that_it_cost_nothing(offloading, output):
    offloading(5.0)
    result = output(simulate.main, *SIZES, *STRICT, "--json")
    assert result["makespan_ms_mean"] == result["makespan_ms_without_engines"] == 450
    assert result["peak_memory"] == [2, 3, 2, 1]
    assert result["host_peak"] == [3, 0, 0, 0]
    assert result["engine_busy"] == [{"d2h": pytest.approx(60 / 450), "h2d": pytest.approx(60 / 450)}, {}, {}, {}]
    assert result["bottleneck"] is None
    text = output(simulate.main, *SIZES, *STRICT)
    assert "13.3%" in text
    assert "on the device at once, which may hold bounds" in text
    assert "memory, on host: the most microbatches" in text
    assert "holds the step up" not in text


def test_simulate_names_the_engine_that_holds_the_step_up(offloading, output):
    offloading(25.0, lanes=("copy", "copy"))
    result = output(simulate.main, *SIZES, *STRICT, "--json")
    assert result["idle_ms"][0]["engine"] > 0.1 * result["makespan_ms_mean"]
    assert result["lower_bound_ms"] == 24 * 25 + 10 + 20
    assert result["makespan_ms_mean"] >= result["lower_bound_ms"] > result["makespan_ms_without_engines"]
    assert result["bottleneck"].startswith("the engine copy of stage 0 is busy 9")
    assert result["bottleneck"] in output(simulate.main, *SIZES, *STRICT)
    assert result["bottleneck"] in output(simulate.main, *SIZES, "--compare", "1f1b:strict,gpipe:strict")


def test_simulate_names_a_stage_whose_operations_come_late(offloading, output):
    offloading(12.0, lead=0)
    result = output(simulate.main, *SIZES, *STRICT, "--json")
    assert max(share for lanes in result["engine_busy"] for share in lanes.values()) < 0.5
    assert result["makespan_ms_mean"] > result["makespan_ms_without_engines"]
    assert result["bottleneck"].startswith("stage 0 waits ")
    assert "issue their operations earlier (lead)" in result["bottleneck"]


def test_a_run_without_operations_says_nothing_of_engines(output):
    result = output(simulate.main, *SIZES, *STRICT, "--json")
    assert result["engine_busy"] == [{}] * 4
    assert not {"host_peak", "bottleneck", "makespan_ms_without_engines"} & set(result)
    assert "busy" not in output(simulate.main, *SIZES, *STRICT)


OWN = """
from rrfp_jax.schedules import schedule
from rrfp_jax.schedules.language import B, F, rounds
from rrfp_jax.schedules import Op

first = {"chunks": frozenset({0}), "lane": "copy", "ms": 40.0}
out = Op("O", after=("F",), frees=1.0, **first)
back = Op("L", after=("O",), before=("B",), holds=1.0, **first)


@schedule("mine", ops=(out, back))
def mine(s):
    return rounds(F.ahead(s.p - 1 - s.i), B)
"""


@pytest.mark.slow
def test_emulate_tells_the_same_of_the_real_runtime(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    order = ("--schedule", f"{tmp_path / 'own.py'}:mine", "--consume", "strict")
    sizes = ("--num-stages", 2, "--num-microbatches", 6, "--durations-ms", "2,2,2", "--steps", 2)
    result = run_command("emulate", *sizes, *order, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["host_peak"][1] == 0
    assert 0 < figures["host_peak"][0] <= 2
    assert figures["peak_memory"][0] <= 2
    assert figures["engine_busy"][0]["copy"] > 0.5
    assert "the engine copy of stage 0 is busy" in figures["bottleneck"]
    result = run_command("emulate", *sizes, *order, "--events", tmp_path / "events.json.gz")
    assert "on host" in result.stdout
    assert figures["bottleneck"].split(" is busy")[0] in result.stdout
    result = run_command("replay", tmp_path / "events.json.gz", "--microbatch", 1, "--stage", 0)
    assert "every instruction is the same as in the run" in result.stdout
    assert "0L1 was dispatched" in result.stdout


def test_levels_counts_what_is_on_the_device(offloading, output):
    for module in (formulas, levels):
        offloading(5.0, module=module)
    row = output(levels.main, *SIZES, "--schedules", "1f1b", "--json")["schedules"]["1f1b"]
    assert row["table"]["peak"] == row["strict"]["peak"] == row["hint"]["peak"] == 3
    assert row["table"]["bubble"] == pytest.approx(row["strict"]["bubble"]) == pytest.approx(0.2)


def test_pictures_and_traces_of_a_simulated_run_show_engines(offloading, output, tmp_path):
    offloading(5.0)
    outputs = ("--timeline", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json"))
    output(simulate.main, *SIZES, *STRICT, *outputs)
    assert "O: operation on d2h" in (tmp_path / "a.svg").read_text()
    assert '"d2h"' in (tmp_path / "a.json").read_text()
