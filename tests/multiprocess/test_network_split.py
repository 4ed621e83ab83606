"""Two hosts, played by network namespaces, lose the network between them: no report names a rank that was heard.

Each namespace has a launcher, two ranks and a host name of its own; a pair of virtual interfaces joins them.
"""

import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rrfp_jax.cluster import RunKey
from tests.multiprocess.launching import Launched, launched
from tests.multiprocess.reports import rank_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIDES = ((0, 1), (2, 3))
HOSTS = ("west", "east")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
SILENCE_S = 4.0
LOST_SIGHT = r"error: .*ranks? 0?-?1? and ranks? 2?-?3? lost sight of each other: the network between west and east"
ENDED_S = 60.0
"""Within which both launchers have ended: silence, farewells, and 10 s for a launcher that answers no more."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two joined network namespaces; in each the interface to the other is ``wire``."""
    mark = uuid.uuid4().hex[:8]
    names = f"rrfp-{mark}-0", f"rrfp-{mark}-1"
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "wire", "up")
            subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here (they need root and the command ip): {error}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def cut(namespaces: tuple[str, str], how: str) -> None:
    if how == "link down":
        ip("-n", namespaces[0], "link", "set", "wire", "down")
    else:  # what the east sends goes to a station that does not exist; what the west sends still arrives
        ip(
            "-n",
            namespaces[1],
            "neighbour",
            "replace",
            ADDRESSES[0],
            "lladdr",
            "02:00:00:00:00:99",
            "dev",
            "wire",
            "nud",
            "permanent",
        )


def launcher_of(side: int, namespace: str, key: dict[str, str]) -> tuple[tuple[object, ...], tuple[str, ...]]:
    arguments = (
        *("--nodes", 2, "--node-rank", side, "--head", f"{ADDRESSES[0]}:8476", "--interface", ADDRESSES[side]),
        *("--processes", 2, "--grace-s", 6, "--start-deadline-s", 40, "--", "faulty", "none", 0),
        *("emulate", "--num-stages", 4, "--num-microbatches", 4, "--durations-ms", "5,5,5", "--steps", 100_000),
        *("--silence-deadline-s", SILENCE_S, "--progress-deadline-s", 30),
    )
    named = f'hostname {HOSTS[side]} && exec "$@"'
    return arguments, ("ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", named, "sh")


def accused(text: str) -> set[int]:
    """The ranks that a report says were lost."""
    return {int(rank) for rank in re.findall(r"rank (\d+) \(stage \d+\) was lost", text)}


@pytest.mark.parametrize("how", ["link down", "one direction"])
def test_nobody_names_itself_nor_whom_it_hears(namespaces: tuple[str, str], how: str) -> None:
    key = RunKey.generate().environment()
    with ExitStack() as stack:
        launchers: list[Launched] = []
        for side, namespace in enumerate(namespaces):
            arguments, within = launcher_of(side, namespace, key)
            launchers.append(stack.enter_context(launched(*arguments, within=within, **key)))
        for launcher in launchers:
            launcher.numbers(r"running (\d+)", 2)
        started_s = time.monotonic()
        cut(namespaces, how)
        codes = [launcher.wait(ENDED_S) for launcher in launchers]
        assert time.monotonic() - started_s < ENDED_S
        assert not any(launcher.living() for launcher in launchers)
    texts = {rank: rank_text(launcher, rank) for launcher, side in zip(launchers, SIDES, strict=True) for rank in side}
    assert codes == [5, 5]
    for launcher, own, others in zip(launchers, SIDES, reversed(SIDES), strict=True):
        for rank in own:
            named = accused(texts[rank])
            assert not named & set(own), texts[rank]
            assert named == set(others) or re.search(LOST_SIGHT, texts[rank]), texts[rank]
            assert "Traceback" not in texts[rank]
        told = rf"ranks ({own[0]}-{own[1]}|0-3): code 5, lost another rank"  # of the others where word of them came
        assert re.search(told, launcher.text), launcher.text
