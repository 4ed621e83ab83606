"""Event logs of a run as files, and their replay on any machine: no JAX, no model, no hardware."""

from rrfp_jax.runtime.log_file.file import PATTERN, log_name, read_log, write_log
from rrfp_jax.runtime.log_file.merging import RunReplay, replay_run
from rrfp_jax.runtime.log_file.records import RunLog, StageLog, take_log
from rrfp_jax.runtime.log_file.replaying import Difference, StageReplay, replay_log
from rrfp_jax.runtime.log_file.telling import Happening, happenings, standing

__all__ = [
    "PATTERN",
    "Difference",
    "Happening",
    "RunLog",
    "RunReplay",
    "StageLog",
    "StageReplay",
    "happenings",
    "log_name",
    "read_log",
    "replay_log",
    "replay_run",
    "standing",
    "take_log",
    "write_log",
]
