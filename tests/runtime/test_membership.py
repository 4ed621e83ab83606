"""What the environment says of a process's place in a run."""

import pytest

from rrfp_jax.cluster import ClusterConfig, Membership
from rrfp_jax.runtime.cluster import membership_from

FULL = {
    "RRFP_RANK": "1",
    "RRFP_NUM_RANKS": "4",
    "RRFP_RENDEZVOUS": "tcp://127.0.0.1:4000",
    "RRFP_COORDINATOR": "127.0.0.1:4001",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_nothing_is_said():
    assert membership_from({"PATH": "/bin", "RRFP_RUN_KEY": "x"}) is None


@pytest.mark.parametrize(("attempt", "interface"), [(0, None), (2, "eth0")])
def test_there_and_back(attempt: int, interface: str | None):
    made = Membership(
        rank=1,
        num_ranks=4,
        rendezvous="tcp://[::1]:4000",
        coordinator="[::1]:4001",
        attempt=attempt,
        interface=interface,
    )
    assert membership_from(made.environment()) == made


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"RRFP_RANK": "4"}, "ranks count from 0 to 3"),
        ({"RRFP_RANK": "-1"}, "RRFP_RANK is '-1': give a number"),
        ({"RRFP_RANK": None}, "set but not RRFP_RANK"),
        ({"RRFP_NUM_RANKS": None}, "RRFP_NUM_RANKS is not set: start it with rrfp launch"),
        ({"RRFP_RENDEZVOUS": "127.0.0.1:4000"}, "give tcp://host:port"),
        ({"RRFP_RENDEZVOUS": "tcp://:4000"}, "give tcp://host:port"),
        ({"RRFP_COORDINATOR": "127.0.0.1"}, "give host:port"),
        ({"RRFP_ATTEMPT": "x"}, "RRFP_ATTEMPT is 'x'"),
        ({"RRFP_DETECT": "perhaps"}, "RRFP_DETECT is 'perhaps': give 1 or 0"),
    ],
)
def test_what_is_malformed_or_missing_is_named(change: dict[str, str | None], advice: str):
    environ = {name: value for name, value in {**FULL, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=advice.replace("(", r"\(")):
        membership_from(environ)


def test_jax_detects_the_rank(monkeypatch):
    places = {name: FULL[name] for name in ("RRFP_RENDEZVOUS", "RRFP_COORDINATOR")}
    with pytest.raises(ValueError, match="JAX finds no cluster environment"):
        membership_from({**places, "RRFP_DETECT": "1"})
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)  # JAX looks at the process's own environment
    found = membership_from({**places, "RRFP_DETECT": "1"})
    assert found is not None
    assert (found.rank, found.num_ranks) == (3, 4)
    told = membership_from({**FULL, "RRFP_DETECT": "1"})
    assert told is not None
    assert told.rank == 1  # what a launcher says comes first


def test_detection_that_is_misconfigured(monkeypatch):
    for name, value in {**SLURM, "SLURM_PROCID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="slurm was detected, but does not tell the rank"):
        membership_from({"RRFP_DETECT": "1"})


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"silence_deadline_s": 0.0}, "silence_deadline_s is 0.0"),
        ({"silence_deadline_s": 90000.0}, "give at most 3600"),
        ({"start_deadline_s": float("inf")}, "start_deadline_s is inf"),
        ({"interface": " "}, "interface is empty"),
    ],
)
def test_cluster_configurations_that_cannot_be_meant(values: dict, advice: str):
    with pytest.raises(ValueError, match=advice):
        ClusterConfig(**values)
