"""Not a test: the train command with a stage that hangs in its third step, in a thread that nothing can stop."""

import signal
import threading
from functools import partial
from typing import Any

from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.train import main
from rrfp_jax.commands.training import assembly


class HangingStage:
    """Passes everything on, but never returns from a task of step 2."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def launch(self, step: int, task: Any) -> Any:
        if step == 2:
            # the interpreter would wait for such a thread before it ends
            hung = threading.Thread(target=threading.Event().wait, daemon=False)
            hung.start()
            hung.join()
        return self._stage.launch(step, task)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assembly.RuntimeOptions = partial(assembly.RuntimeOptions, wrap_stage=HangingStage)  # type: ignore[assignment,misc]
    run_command(main)
