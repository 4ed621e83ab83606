"""Graphs on the command line: encoders and a decoder, on any stages, in simulate, emulate and levels."""

import json
from argparse import ArgumentParser

import numpy as np
import pytest

from experiments import levels
from rrfp_jax.commands import simulate
from rrfp_jax.commands.studies import GraphOptions, add_graph_arguments, from_array, make_graph, parse_graph
from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    absences,
    build_schedule,
    chain,
    linear,
    write_csv,
)
from tests.commands.running import run_command, sentence

SIZES = ("--num-stages", "4", "--num-microbatches", "8")


def wishes(*arguments):
    parser = ArgumentParser()
    add_graph_arguments(parser)
    return parse_graph(parser.parse_args(arguments))


def simulated(capsys, *arguments):
    assert simulate.main([*SIZES, *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_encoders_feed_the_decoders_first_chunk():
    model = make_graph(wishes("--encoders", "2,1"), num_stages=5, num_microbatches=8)
    edges = (Edge(0, 1), Edge(1, 3, is_optional=True), Edge(2, 3, is_optional=True), Edge(3, 4))
    assert (model.graph, model.placement) == (PipelineGraph(5, 8, edges), linear(5))
    assert (model.encoders, model.decoder) == ((range(2), range(2, 3)), range(3, 5))


def test_encoders_may_be_frozen_and_share_stages():
    said = wishes("--encoder-stages", "1", "--frozen-encoder", "--frozen-chunks", "2", "--stage-of-chunk", "0,0,1,2")
    model = make_graph(said, num_stages=3, num_microbatches=8)
    assert model.placement == Placement((0, 0, 1, 2))
    assert model.graph.frozen == {0, 2}
    assert [model.graph.has_backward(chunk) for chunk in range(4)] == [False, True, True, True]


def test_without_encoders_a_placement_holds_a_chain():
    model = make_graph(wishes("--stage-of-chunk", "0,1,1,0"), num_stages=2, num_microbatches=8)
    assert (model.graph, model.encoders) == (chain(4, 8), ())
    assert wishes() == GraphOptions()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoders", "two"), "encoders 'two' is not made of whole numbers: write for example 2,1"),
        (("--encoders", "2,0"), "give each at least 1"),
        (("--encoders", "4"), "encoders take 4 of 4 chunks, which leaves the decoder none"),
        (("--frozen-encoder",), "frozen-encoder freezes encoders, and there is none"),
        (("--frozen-chunks", "0,1,2,3"), "frozen-chunks 0,1,2,3 leave nothing to train"),
        (("--frozen-chunks", "9"), "chunk 9 is not one of the 4 chunks"),
        (("--stage-of-chunk", "0,1,2"), "stage-of-chunk 0,1,2 names 3 stages, num-stages is 4"),
        (("--stage-of-chunk", "0,1,2,4"), "without a chunk"),
        (("--stage-of-chunk", "0,1,2,3,-1"), "has a stage below 0"),
        (("--encoders", "1", "--schedule", "zb-v"), "'zb-v' makes a chain of chunks and its own placement"),
        (("--encoders", "1", "--chunks-per-stage", "2"), "write --stage-of-chunk, for example 0,1,0,1"),
        (("--encoders", "1", "--compare", "1f1b:strict,gis"), "'gis' makes a chain"),
    ],
)
def test_what_makes_no_graph_is_refused_in_one_sentence(arguments, message):
    assert message in sentence(run_command("simulate", *SIZES, *arguments))


def test_a_strict_table_with_two_encoders(capsys):
    result = simulated(capsys, "--encoders", "1,1", "--schedule", "1f1b", "--consume", "strict")
    # the decoder's two stages do 8 x 30 ms, behind one encoder's F and before its B
    assert result["makespan_ms"] == [10 + 10 + 8 * 30 + 20 + 20]
    assert result["peak_in_flight"] == [3, 3, 2, 1]


def test_a_frozen_encoder_has_no_backward(capsys):
    result = simulated(capsys, "--encoders", "1,1", "--frozen-encoder", "--schedule", "zb-h1", "--consume", "strict")
    assert result["order"][0] == [f"0F{m}" for m in range(8)]
    assert result["makespan_ms"][0] < 300


@pytest.fixture
def with_gaps(tmp_path):
    """A file of two steps: the encoder lacks microbatches 0 and 3 in the first, all in the second."""
    durations_ms = np.full((2, 4, 8, 3), 1.0)
    durations_ms[0, 0, [0, 3]] = np.nan
    durations_ms[1, 0] = np.nan
    np.save(tmp_path / "gaps.npy", durations_ms)
    return tmp_path / "gaps.npy"


def test_a_file_says_which_pairs_do_not_exist(with_gaps, capsys):
    durations = from_array(np.load(with_gaps))
    assert durations.absent == [absences([(0, 0), (0, 3)]), absences((0, m) for m in range(8))]
    assert not np.isnan(durations.durations_ms).any()
    result = simulated(capsys, "--encoders", "1", "--schedule", "1f1b", "--consume", "strict", "--durations", with_gaps)
    assert result["order"][0] == []
    assert result["makespan_ms"][1] == 3 * 8 + 2 * 3
    assert result["lower_bound_ms"] <= result["makespan_ms_mean"]


def test_the_real_runtime_lacks_the_same_pairs(with_gaps):
    result = run_command(
        "emulate", *SIZES, "--encoders", 1, "--durations", with_gaps, "--schedule", "zb-h1", "--steps", 4, "--json"
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["order"][0] == []
    assert [len(row) for row in figures["order"][1:]] == [24, 24, 24]


def test_gaps_that_leave_a_chunk_without_input_are_refused(tmp_path):
    durations_ms = np.full((1, 4, 8, 3), 1.0)
    durations_ms[0, 2, 5] = np.nan
    np.save(tmp_path / "gaps.npy", durations_ms)
    for command in ("simulate", "emulate"):
        message = sentence(run_command(command, *SIZES, "--encoders", 1, "--durations", tmp_path / "gaps.npy"))
        assert "microbatch 5" in message
    durations_ms[0, 2, 5, 0] = 1.0
    with pytest.raises(ValueError, match="NaN for some tasks of a pair only"):
        from_array(durations_ms)


def test_levels_compare_the_schedules_that_fit_the_graph(capsys):
    assert levels.main([*SIZES, "--encoders", "1,1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["schedules"]) == {"1f1b", "1f1b-split", "gpipe", "zb-h1", "zb-h2"}
    assert all(row["formula"]["formulas"] == [] for row in result["schedules"].values())


def test_a_frozen_chunk_takes_the_same_time_at_all_levels(capsys):
    arguments = [*SIZES, "--encoders", "1", "--frozen-chunks", "2", "--schedules", "1f1b,zb-h1", "--json"]
    assert levels.main(arguments) == 0
    for row in json.loads(capsys.readouterr().out)["schedules"].values():
        assert row["table"]["bubble"] == pytest.approx(row["strict"]["bubble"])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_table_of_a_graph_may_come_from_a_file(name, tmp_path, capsys):
    model = make_graph(wishes("--encoders", "1,1"), num_stages=4, num_microbatches=8)
    request = ScheduleRequest(num_stages=4, num_microbatches=8, graph=model.graph, placement=model.placement)
    write_csv(build_schedule(name, request), tmp_path / "mine.csv")
    results = [
        simulated(capsys, "--encoders", "1,1", "--consume", "strict", "--schedule", schedule)
        for schedule in (name, tmp_path / "mine.csv")
    ]
    assert results[0] == results[1]
