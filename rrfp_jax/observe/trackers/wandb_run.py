"""``wandb/``: a run of Weights & Biases, a history row for every row; its charts have ``step`` as their axis.

W&B takes no rows back. A run that goes on therefore goes on there as the same run only where that holds exactly the
rows that count, which it does after an orderly end. Otherwise a new run gets all of them, in the group of the old one,
which stays as it is. Offline every start writes a folder with all rows, under the same id while it was not synced, and
removes the folder before it.
"""

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, cast

from rrfp_jax.observe.trackers.columns import STEP, Row, scalars, step_of
from rrfp_jax.observe.trackers.interface import RowDigest, TrackedRun, Tracker

_NAME = "wandb"
_FINISH_S = 15.0
"""How long W&B may take to upload what is left; what is not stays on the disk, for ``wandb sync``."""


def start(run: TrackedRun) -> Tracker:
    """Begin a run of W&B, or go on with one. Raises RuntimeError where nobody is logged in."""
    mode = run.settings.wandb_mode or os.environ.get("WANDB_MODE") or "online"
    return _offline(run) if mode == "offline" else _online(run, mode)


class _WandbRun:
    def __init__(self, run: TrackedRun, mode: str, run_id: str, *, goes_on: bool) -> None:
        import wandb

        self._run, self._id = run, run_id
        self._rows = run.past.digest() if goes_on else RowDigest()
        quiet = wandb.Settings(
            mode=cast(Any, mode),
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            finish_timeout=_FINISH_S,
        )
        self._wandb: Any = wandb.init(
            project=run.settings.project,
            entity=run.settings.wandb_entity,
            name=run.name,
            group=run.name,
            id=run_id,
            resume="allow" if goes_on else None,
            dir=str(run.path),
            config=dict(run.config),
            settings=quiet,
        )
        self.folder = Path(self._wandb.dir).parent
        """Where this start keeps what it writes."""
        self._wandb.define_metric("*", step_metric=STEP)
        self._keep(rows=None)
        if not goes_on:
            for row in run.past:
                self.write(row)

    def write(self, row: Row) -> None:
        self._wandb.log({STEP: step_of(row), **scalars(row)})
        self._rows.add(row)

    def close(self, *, failed: bool) -> None:
        import wandb

        self._wandb.finish(exit_code=int(failed))
        wandb.teardown(exit_code=int(failed))  # W&B's own process has written its files only when that has ended
        self._keep(rows=str(self._rows))

    def _keep(self, *, rows: str | None) -> None:
        """Which rows it holds is known only after an orderly end."""
        self._run.keep_state(_NAME, {"id": self._id, "folder": self.folder.name, "rows": rows})


def _online(run: TrackedRun, mode: str) -> Tracker:
    import wandb

    if mode == "online" and wandb.api.api_key is None:  # it would ask for one on a terminal
        raise RuntimeError("nobody is logged in: run `wandb login`, or give --tracking.wandb-mode offline")
    before = run.state(_NAME)
    goes_on = "id" in before and before.get("rows") == str(run.past.digest())
    return _WandbRun(run, mode, before["id"] if goes_on else secrets.token_hex(4), goes_on=goes_on)


def _offline(run: TrackedRun) -> Tracker:
    before = run.state(_NAME)
    old = run.path / "wandb" / Path(str(before.get("folder", "none"))).name
    is_synced = not old.name.startswith("offline-") or any(old.glob("*.synced"))
    is_same = "id" in before and not is_synced
    tracker = _WandbRun(run, "offline", str(before["id"]) if is_same else secrets.token_hex(4), goes_on=False)
    if is_same and old.is_dir() and old != tracker.folder:
        shutil.rmtree(old)
    return tracker
