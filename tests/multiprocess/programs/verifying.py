"""A rank of ``rrfp train`` that goes wrong: ``verifying HOW RANK STEP OPTION ...``.

``flip``: from training step STEP on, one bit of all outputs of rank RANK is another one. ``kill``: it dies within the
first verification after STEP steps. ``none``: all is well.
"""

import os
import signal
import sys
from dataclasses import replace
from typing import Any

from rrfp_jax.commands import train
from rrfp_jax.commands.common.errors import run_command
from tests.spoilt import of_outputs, spoil

HOW, RANK, STEP = sys.argv[1], *map(int, sys.argv[2:4])


class WrongStage:
    """Passes everything on, and goes wrong from some step on."""

    def __init__(self, stage: Any) -> None:
        self._stage, self._is_spoilt = stage, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def launch(self, step: int, task: Any) -> Any:
        batch = self._stage._steps[step].batch
        if batch.step >= STEP and HOW == "kill" and batch.verifies:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch.step >= STEP and HOW == "flip" and not self._is_spoilt:
            self._is_spoilt = True
            spoil(self._stage, "forward", of_outputs)
        return self._stage.launch(step, task)


def main() -> int:
    from rrfp_jax.commands.training import assembly

    make_options = assembly._runtime_options
    if int(os.environ["RRFP_RANK"]) == RANK:
        assembly._runtime_options = lambda config: replace(make_options(config), wrap_stage=WrongStage)
    return train.main(sys.argv[4:])


if __name__ == "__main__":
    run_command(main)
