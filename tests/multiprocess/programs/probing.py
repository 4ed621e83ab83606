"""The command emulate, where ``auto`` tries transfers on CPU too; every rank says to whom arrays go by transfer.

``HANGS`` names a rank whose fetch never ends, ``DEADLINE_S`` how long fetches may take.
"""

import os
import sys
import time
from functools import partial
from typing import Any

from experiments.emulate import main
from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.runtime import process
from rrfp_jax.runtime.transports import transfer as probing


class Trying(process.Process):
    def _connect_stages(self, *arguments: Any) -> frozenset[int]:
        by_transfer = super()._connect_stages(*arguments)
        print(f"by transfer: {sorted(by_transfer)}", file=sys.stderr, flush=True)
        return by_transfer

    def start_jax(self, *arguments: Any, **options: Any) -> None:
        super().start_jax(*arguments, **options)
        if str(self.rank) == os.environ.get("HANGS"):
            from rrfp_jax.runtime.transports import transfer

            transfer.ServerProbe.fetch = lambda *_: time.sleep(600)  # type: ignore[method-assign]


if __name__ == "__main__":
    process.Process = Trying  # type: ignore[misc]
    process.why_untried = lambda platform, encrypts: None
    deadline_s = float(os.environ.get("DEADLINE_S", "20"))
    process.try_transfers = partial(probing.try_transfers, deadline_s=deadline_s)
    run_command(main)
