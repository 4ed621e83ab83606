"""Whether two ranks can start on this host, meet, and run a step together: the launcher and the emulation, for real."""

import os
import subprocess
import time
from typing import Any

from rrfp_jax.commands.diagnosis.finding import Finding, ok, problem, warning
from rrfp_jax.launch.as_module import python_module
from rrfp_jax.network.config import ATTEMPT, COORDINATOR, DETECT, NUM_RANKS, RANK, RENDEZVOUS

_LAUNCH = "launch --processes 2 --start-deadline-s 60 --grace-s 5 --prefix always"
_RANK = "rrfp_jax.commands.diagnosis.rank_probe"
_DEADLINE_S = 150.0
_OF_A_RANK = (RANK, NUM_RANKS, RENDEZVOUS, COORDINATOR, ATTEMPT, DETECT)
"""Variables under which the ranks would take themselves for those of another run."""
_REASON = 300


def check_start(*, jax_starts: bool, deadline_s: float = _DEADLINE_S) -> Finding:
    """Start them, wait, and leave nothing behind."""
    if not jax_starts:
        return warning("not tried, since JAX does not start", "see above")
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    options = [*_LAUNCH.split(), "--", _RANK]
    command = python_module("rrfp_jax.commands.main", *options)
    started_s = time.monotonic()
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **streams) as launcher:
        try:
            told, _ = launcher.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            launcher.kill()  # its ranks end with it
            return problem(f"two ranks were not done after {deadline_s:g} s", _by_hand(options))
        except BaseException:
            launcher.kill()
            raise
    took_s = time.monotonic() - started_s
    if launcher.returncode:
        return problem(
            f"two ranks did not come to run a step, code {launcher.returncode}: {_first_error(told)}",
            _by_hand(options),
            code=launcher.returncode,
        )
    return ok(f"started, met and ran steps together, in {took_s:.0f} s", seconds=round(took_s, 1))


def _first_error(told: str) -> str:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    chosen = next((line for line in lines if "error:" in line or "Error" in line), lines[-1] if lines else "no word")
    return chosen[:_REASON]


def _by_hand(options: list[str]) -> str:
    return f"mend what is wrong above, or see all that is said: rrfp {' '.join(options)}"
