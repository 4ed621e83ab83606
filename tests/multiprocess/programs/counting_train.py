"""The training command, which writes down for its rank what JAX says of compilations, and how long the start took."""

import json
import os
import sys
import time
from pathlib import Path

import jax

from rrfp_jax.commands.train import main

FOLDER = Path(os.environ["COUNTS"])
EVENTS = ("compile_requests_use_cache", "cache_hits")


def watch() -> dict[str, float]:
    counts: dict[str, float] = dict.fromkeys(EVENTS, 0)

    def count(event: str, **_: object) -> None:
        name = event.rpartition("/")[2]
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_listener(count)
    return counts


if __name__ == "__main__":
    counts, started_s = watch(), time.monotonic()
    code = main(sys.argv[1:])
    counts["seconds"] = time.monotonic() - started_s
    (FOLDER / os.environ["RRFP_RANK"]).write_text(json.dumps(counts))
    sys.exit(code)
