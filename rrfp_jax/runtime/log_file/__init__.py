"""Event logs of a run as files, and their replay on any machine: no JAX, no model, no hardware."""

from rrfp_jax.runtime.log_file.merging import RunReplay as RunReplay
from rrfp_jax.runtime.log_file.merging import replay_run as replay_run
from rrfp_jax.runtime.log_file.replaying import Difference as Difference
from rrfp_jax.runtime.log_file.replaying import StageReplay as StageReplay
from rrfp_jax.runtime.log_file.replaying import replay_log as replay_log
from rrfp_jax.runtime.log_file.run_log import PATTERN as PATTERN
from rrfp_jax.runtime.log_file.run_log import RunLog as RunLog
from rrfp_jax.runtime.log_file.run_log import StageLog as StageLog
from rrfp_jax.runtime.log_file.run_log import log_name as log_name
from rrfp_jax.runtime.log_file.run_log import read_log as read_log
from rrfp_jax.runtime.log_file.run_log import take_log as take_log
from rrfp_jax.runtime.log_file.run_log import write_log as write_log
from rrfp_jax.runtime.log_file.telling import Happening as Happening
from rrfp_jax.runtime.log_file.telling import happenings as happenings
from rrfp_jax.runtime.log_file.telling import standing as standing
