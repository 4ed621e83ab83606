"""The levels command, as a user runs it."""

import json

import pytest

from experiments.levels import main
from experiments.levels_report import places
from rrfp_jax.schedules import schedule_names
from tests.commands.running import run_command, sentence

SIZES = ("--num-stages", "8", "--num-microbatches", "16")
SMALL = ("--num-stages", "4", "--num-microbatches", "8")


@pytest.fixture
def levels(capsys):
    """Run the command with ``--json``; give the last line's object."""

    def run(*arguments: object) -> dict:
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("durations", ["10,10,10", "10,5,5", "8,12,3"])
def test_strict_execution_of_every_schedule_is_its_ideal_table(levels, durations):
    rows = levels(*SIZES, "--durations-ms", durations)["schedules"]
    assert set(rows) == set(schedule_names())
    for name, row in rows.items():
        assert row["strict"]["bubble"] == pytest.approx(row["table"]["bubble"], abs=1e-9), name
        assert row["strict"]["peak"] == pytest.approx(row["table"]["peak"]), name
        assert "strict" not in row["bubble_disagrees"] + row["peak_disagrees"]


@pytest.mark.slow
def test_closed_forms_of_our_own_are_the_table(levels):
    for durations in ("10,10,10", "10,5,5"):
        for name, row in levels(*SIZES, "--durations-ms", durations)["schedules"].items():
            if row["formula"]["bubble_closed_form"] is not None:
                assert row["formula"]["bubble_closed_form"] == pytest.approx(row["table"]["bubble"]), name


def test_chimera_has_sixteen_or_twenty_seven_percent_by_the_slots(levels):
    equal = levels(*SIZES, "--schedules", "chimera", "--durations-ms", "10,5,5")["schedules"]["chimera"]
    assert equal["formula"]["bubble_paper"] == pytest.approx(6 / 38)
    assert equal["table"]["bubble"] == pytest.approx(6 / 38)
    assert equal["strict"]["bubble"] == pytest.approx(6 / 38)
    longer = levels(*SIZES, "--schedules", "chimera")["schedules"]["chimera"]
    assert longer["formula"]["bubble_paper"] is None
    assert longer["table"]["bubble"] == pytest.approx(18 / 66)
    assert longer["strict"]["bubble"] == pytest.approx(18 / 66)
    assert longer["bubble_disagrees"] == ["hint"]


def test_slot_lengths_of_their_own_leave_the_execution_alone(levels):
    asked = (*SIZES, "--schedules", "chimera,1f1b", "--durations-ms", "10,10,10")
    chimera = levels(*asked, "--slot-lengths", "1,0.5,0.5")["schedules"]["chimera"]
    assert chimera["table"]["bubble"] == pytest.approx(6 / 38)
    assert chimera["strict"] == levels(*asked)["schedules"]["chimera"]["strict"]
    assert chimera["bubble_disagrees"] == ["strict", "hint"]


def test_durations_are_those_of_a_whole_stage(levels):
    rows = levels(*SMALL, "--schedules", "1f1b,interleaved-1f1b,gpipe")["schedules"]
    makespans_ms = {name: row["strict"]["makespan_ms_mean"] for name, row in rows.items()}
    assert makespans_ms == {"1f1b": 330, "gpipe": 330, "interleaved-1f1b": 285}


def test_communication_and_jitter_slow_the_execution_only(levels):
    asked = (*SMALL, "--schedules", "1f1b,hanayo")
    calm = levels(*asked)["schedules"]
    slow = levels(*asked, "--comm-ms", 2)["schedules"]
    noisy = levels(*asked, "--comm-ms", 2, "--jitter", "lognormal:0.5", "--steps", 3)["schedules"]
    for name in ("1f1b", "hanayo"):
        assert calm[name]["table"] == slow[name]["table"] == noisy[name]["table"]
        bubbles = [rows[name]["strict"]["bubble"] for rows in (calm, slow, noisy)]
        assert bubbles == sorted(set(bubbles))


def test_the_window_is_the_hints(levels):
    asked = (*SIZES, "--schedules", "1f1b,zb-h1")
    free, own, four = (levels(*asked, *w)["schedules"] for w in ((), ("--window", "table"), ("--window", 4)))
    assert [rows["zb-h1"]["hint"]["peak"] for rows in (free, own, four)] == [16, 8, 4]
    assert free["zb-h1"]["peak_disagrees"] == ["hint"]
    assert own["1f1b"]["strict"] == four["1f1b"]["strict"] == free["1f1b"]["strict"]


def test_a_formula_says_where_it_holds(levels):
    row = levels(*SIZES, "--schedules", "dualpipe-v")["schedules"]["dualpipe-v"]
    assert row["formula"]["peak"] is None
    assert [form["holds"] for form in row["formula"]["formulas"]] == [True, True, False]
    assert row["bubble_disagrees"] == ["paper"]


def test_schedules_that_do_not_fit_are_listed_with_the_reason(levels, capsys):
    sizes = ("--num-stages", "7", "--num-microbatches", "13")
    refused = levels(*sizes)["refused"]
    assert set(refused) == {
        *("asymmetric-chimera", "bitpipe", "chimera", "dualpipe-v", "gis", "greedy-chimera"),
        *("interleaved-1f1b", "interleaved-1f1b-split"),
    }
    assert main([*sizes]) == 0
    shown = capsys.readouterr().out
    assert "chimera is left out: two directions" in shown
    assert all(reason in shown for reason in refused.values())


@pytest.mark.slow
def test_the_tables_for_people(capsys):
    assert main([*SIZES, "--comm-ms", "1", "--jitter", "lognormal:0.2", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in schedule_names())
    assert shown.index("(n): the schedule's place by bubble") < shown.index("12.7%*"), "signs are explained first"
    assert all(words in shown for words in ("12.7%*", "not here: B = F", "(p-1)(F+I-W)/2", "async 1 ms, jitter"))


def test_equal_rates_share_a_place():
    assert places([0.2, 0.1, 0.1 + 1e-12, 0.0, 0.3]) == [4, 2, 2, 1, 5]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schedules", "1f2b"), "did you mean '1f1b'"),
        (("--schedules", "interleaved-1f1b", "--num-microbatches", "9"), "no schedule fits"),
        (("--durations-ms", "1,1"), "durations-ms 1,1 must be three numbers"),
        (("--slot-lengths", "1,1"), "slot-lengths 1,1 must be three numbers"),
        (("--slot-lengths", "0,0,0"), "above 0"),
        (("--steps", "0"), "at least 1"),
        (("--seed", "-1"), "0 or more"),
        (("--window", "many"), "write 8"),
        (("--window", "4,4"), "one for each stage"),
        (("--comm", "mail"), "choose one of async"),
        (("--num-stages", "0"), "at least 1"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(flags, message):
    with pytest.raises(ValueError, match=message):
        main([*SMALL, *flags])


def test_the_command_ends_with_code_2_and_one_sentence():
    assert "did you mean '1f1b'" in sentence(run_command("levels", *SMALL, "--schedules", "1f2b"))
