"""The launcher with ranks that know nothing of each other: output, exit codes, signals, restarts, no orphans."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from rrfp_jax.cluster.child_processes import rank_cores
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.launch import main
from tests.multiprocess.launching import ROOT, Launched, eventually, launched


def test_piped_standard_output_is_rank_0s_alone():
    with launched("--processes", 3, "--", "talker") as launcher:
        assert launcher.wait() == 0
    assert launcher.stdout[0] == "hello from 0"
    assert json.loads(launcher.stdout[-1]) == {"rank": 0, "attempt": 0}
    assert len(launcher.stdout) == 2
    for line in ("[rank 0] an error line of 0", "[rank 2] hello from 2", "[rank 2] an error line of 2"):
        assert line in launcher.stderr
    assert launcher.own_lines()[-1].startswith("ranks 0-2 ended well")


@pytest.mark.parametrize(
    ("prefix", "mark"), [("always", "[rank {}] "), pytest.param("never", "", marks=pytest.mark.slow)]
)
def test_streams_stay_apart_where_prefixes_are_chosen(prefix: str, mark: str):
    with launched("--processes", 2, "--prefix", prefix, "--", "talker") as launcher:
        assert launcher.wait() == 0
    for rank in range(2):
        assert f"{mark.format(rank)}hello from {rank}" in launcher.stdout
        assert f"{mark.format(rank)}an error line of {rank}" in launcher.stderr


def test_the_environment_of_a_rank():
    shown = ["NPROC", "OMP_NUM_THREADS", "RRFP_NUM_RANKS", "RRFP_LAUNCHER", "RRFP_RENDEZVOUS", "RRFP_COORDINATOR"]
    flags = [flag for name in shown for flag in ("--show", name)]
    with launched("--processes", 2, "--", "talker", *flags, OMP_NUM_THREADS="3") as launcher:
        assert launcher.wait() == 0
    found = json.loads(launcher.stdout[-1])
    assert found["NPROC"] == "8"
    assert found["OMP_NUM_THREADS"] == "3"  # the user's
    assert (found["RRFP_NUM_RANKS"], found["RRFP_LAUNCHER"]) == ("2", "1")
    assert found["RRFP_RENDEZVOUS"].startswith("tcp://127.0.0.1:")
    assert found["RRFP_COORDINATOR"].startswith("127.0.0.1:")


def test_the_code_of_the_first_to_fail_for_a_reason_of_its_own():
    failing = ("--meet", "--fail", 0, 5, 0, "--fail", 1, 6, 0.1, "--fail", 2, 4, 0.4)
    with launched("--processes", 3, "--", "talker", *failing) as run:
        assert run.wait() == 4
    assert "rank 2 (code 4, a task failed)" in run.own_lines()[0]


@pytest.mark.slow
def test_ranks_that_do_not_end_by_themselves_are_ended():
    started_s = time.monotonic()
    arguments = ("--meet", "--fail", 0, 3, 0.3, "--stubborn", 1, "--run-s", 600)
    with launched("--processes", 2, "--grace-s", 0.5, "--", "talker", *arguments) as launcher:
        assert launcher.wait() == 3
        assert not launcher.living()
    assert 5.0 < time.monotonic() - started_s < 15.0  # SIGTERM first, SIGKILL 5 s later
    assert "  rank 1: did not end by itself: the launcher ended it (code 137, killed by SIGKILL)" in launcher.text


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_the_others_have_ended_is_not_waited_for():
    with launched("--processes", 2, "--", "talker", "--fail", 0, 0, 0.5, "--run-s", 600) as launcher:
        launcher.numbers(r'"rank": (\d)', 2)
        os.kill(launcher.ranks()[1], signal.SIGSTOP)
        assert launcher.wait() != 0
        assert not launcher.living()
    assert "rank 1: stood still (SIGSTOP): the launcher ended it" in launcher.text


def test_signals_are_passed_on_and_a_preempted_run_is_not_restarted():
    arguments = ("--max-restarts", 3, "--", "talker", "--term-code", 7, "--run-s", 600)
    with launched("--processes", 2, *arguments) as launcher:
        launcher.numbers(r'"rank": (\d)', 2)
        launcher.signal(signal.SIGUSR1)
        assert eventually(lambda: sum("usr1" in line for line in launcher.lines) == 2)
        launcher.signal(signal.SIGTERM)
        assert launcher.wait() == 7
    assert "told to stop" in launcher.own_lines()[-1]


@pytest.mark.slow
def test_a_second_request_to_stop_ends_ranks_that_ignore_the_first():
    with launched("--processes", 2, "--", "talker", "--stubborn", 1, "--run-s", 600) as launcher:
        launcher.numbers(r'"rank": (\d)', 2)
        launcher.signal(signal.SIGINT)
        assert eventually(lambda: "passed on" in launcher.text)
        time.sleep(0.3)
        assert launcher.process.poll() is None
        launcher.signal(signal.SIGINT)
        assert launcher.wait() == 130
        assert not launcher.living()


def test_nothing_outlives_a_launcher_that_is_killed():
    with launched("--processes", 2, "--", "talker", "--grandchild", "--stubborn", 0, "--run-s", 600) as launcher:
        launcher.numbers(r'"rank": (\d)', 2)
        assert len(launcher.living()) == 5  # two ranks, their children and the guardian
        launcher.signal(signal.SIGKILL)
        assert eventually(lambda: not launcher.living(), 5.0)


@pytest.mark.slow
def test_ranks_die_with_the_launcher_also_without_its_guardian():
    with launched("--processes", 2, "--", "talker", "--stubborn", 0, "--run-s", 600) as launcher:
        launcher.numbers(r'"rank": (\d)', 2)
        (guardian,) = launcher.running("guardian")
        os.kill(guardian, signal.SIGKILL)
        launcher.signal(signal.SIGKILL)
        assert eventually(lambda: not launcher.living(), 5.0)


def test_the_children_of_a_rank_end_with_it():
    with launched("--processes", 1, "--", "talker", "--grandchild") as launcher:
        assert launcher.wait() == 0
        assert not launcher.living()


def test_a_failed_run_is_started_again_with_another_key_and_other_ports():
    shown = ("--show", "RRFP_RUN_KEY", "--show", "RRFP_RENDEZVOUS")
    failing = ("--fail", 1, 137, 0.1, "--failing-attempts", 1)
    with launched("--processes", 2, "--max-restarts", 3, "--", "talker", *failing, *shown) as launcher:
        assert launcher.wait() == 0
    found = [json.loads(line) for line in launcher.stdout if line.startswith("{")]
    assert [row["attempt"] for row in found] == [0, 1]
    assert len({row["RRFP_RUN_KEY"] for row in found}) == 2
    assert len({row["RRFP_RENDEZVOUS"] for row in found}) == 2


def shown_cores(run: Launched) -> list[tuple[int, list[int], bool]]:
    """What the ranks said of themselves: rank, cores and whether they are scheduled as a batch."""
    rows = [json.loads(line[line.index("{") :]) for line in run.lines if '"cores"' in line]
    return sorted((row["rank"], row["cores"], row["is_batch"]) for row in rows)


def test_every_rank_keeps_to_its_share_of_the_cores_also_after_a_restart():
    failing = ("--fail", 2, 137, 0.1, "--failing-attempts", 1)
    with launched("--processes", 3, "--max-restarts", 1, "--", "talker", "--show-cores", *failing) as launcher:
        assert launcher.wait() == 0
    expected = [(rank, sorted(cores), True) for rank, cores in enumerate(rank_cores("cores", 3))]
    assert shown_cores(launcher) == sorted(expected * 2)


def test_unbound_ranks_run_where_the_launcher_may():
    with launched("--processes", 2, "--bind", "none", "--", "talker", "--show-cores") as launcher:
        assert launcher.wait() == 0
    assert shown_cores(launcher) == [(rank, sorted(os.sched_getaffinity(0)), False) for rank in range(2)]


def test_ranks_may_open_as_many_files_as_the_system_lets_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with launched("--processes", 1, "--", "talker", "--show-cores") as launcher:
            assert launcher.wait() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert json.loads(launcher.stdout[-1])["descriptors"] == min(hard, 1 << 20)


def test_what_is_no_rank_stays_unbound():
    with launched("--processes", 2, "--", "talker", "--meet", "--needs-service", "--run-s", 600) as launcher:
        launcher.numbers(r"met (\d+)", 2)
        assert eventually(lambda: launcher.running("coordination_service"))
        others = [*launcher.running("guardian"), *launcher.running("coordination_service")]
        assert len(others) == 2
        assert all(os.sched_getaffinity(pid) == os.sched_getaffinity(0) for pid in others)
        assert not any(os.sched_getscheduler(pid) == os.SCHED_BATCH for pid in others)


@pytest.mark.parametrize("code", [2, 130])
def test_bad_input_and_interrupts_are_not_started_again(code: int):
    with launched("--processes", 1, "--max-restarts", 2, "--", "talker", "--fail", 0, code, 0) as launcher:
        assert launcher.wait() == code
    assert "restart" not in launcher.text


def test_a_rank_goes_on_where_nobody_reads_its_output():
    with launched("--processes", 1, "--", "talker", "--chatter", 20) as launcher:
        launcher.numbers(r"chatter (\d+)", 1)
        launcher.stop_reading()
        assert launcher.wait() == 0
    assert "ended well" in launcher.own_lines()[-1]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--", "talker"], "give --processes N"),
        (["--processes", "2"], "give it after --"),
        (["--processes", "0", "--", "talker"], "num_processes is 0"),
        (["--processes", "2", "--", "no_such_module"], "no module 'no_such_module'"),
        (["--processes", "2", "--nodes", "2", "--", "talker"], "give head as HOST:PORT"),
        (["--processes", "2", "--nodes", "4;2", "--", "talker"], "--nodes 4;2 is no number of hosts: give one, or"),
        (["--processes", "2", "--nodes", "2,4", "--", "talker"], "the largest first, as 4,2"),
        (["--processes", "2", "--head", "here", "--", "talker"], "give HOST:PORT"),
        (["--processes", "2", "--nodes", "2", "--node-rank", "2", "--head", "h:1", "--", "talker"], "node_rank is 2"),
        (["--processes", "2", "--nodes", "2", "--head", "127.0.0.1:29400", "--", "talker"], "no run key"),
        (["--processes", "2", "--nodes", "2", "--head", "127.0.0.1:29400", "--", "talker"], "launch --new-key FILE"),
        (["--processes", "2", "--nodes", "2", "--head", "0.0.0.0:29400", "--", "talker"], "'0.0.0.0' is no address"),
        (["--processes", "2", "--supervise", "--head", "127.0.0.1:29400", "--", "talker"], "leave out 'talker'"),
        (["--processes", "2", "--grace-s", "0", "--", "talker"], "grace_s is 0"),
        (["--processes", "1", "--nodes", "2", "--head", "no.host.invalid:9", "--", "talker"], "out of reach"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: list[str], advice: str, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "multiprocess" / "programs")
    with pytest.raises(BadInput) as refused:
        main(arguments)
    assert advice in str(refused.value)


def test_too_few_open_files_are_refused_before_anything_starts():
    command = [sys.executable, "-m", "rrfp_jax.commands.main", "launch", "--processes", "2", "--", "talker"]
    limited = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash", *command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'multiprocess' / 'programs'}"}
    ended = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: this process may have 20 files open and needs ")
    assert ended.stderr.count("\n") == 1


def test_the_launcher_loads_no_jax():
    code = (
        "import sys, rrfp_jax.commands.launch; sys.exit(any(name.startswith(('jax', 'flax')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
