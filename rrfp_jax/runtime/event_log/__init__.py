"""Event logs of a run: records of running stages, their files, and their replay without JAX, model or hardware."""

from rrfp_jax.runtime.event_log.files import PATTERN as PATTERN
from rrfp_jax.runtime.event_log.files import RunLog as RunLog
from rrfp_jax.runtime.event_log.files import StageLog as StageLog
from rrfp_jax.runtime.event_log.files import log_name as log_name
from rrfp_jax.runtime.event_log.files import read_log as read_log
from rrfp_jax.runtime.event_log.files import take_log as take_log
from rrfp_jax.runtime.event_log.files import write_log as write_log
from rrfp_jax.runtime.event_log.recording import EventLog as EventLog
from rrfp_jax.runtime.event_log.recording import StageRecorder as StageRecorder
from rrfp_jax.runtime.event_log.replay import Difference as Difference
from rrfp_jax.runtime.event_log.replay import Happening as Happening
from rrfp_jax.runtime.event_log.replay import RunReplay as RunReplay
from rrfp_jax.runtime.event_log.replay import StageReplay as StageReplay
from rrfp_jax.runtime.event_log.replay import happenings as happenings
from rrfp_jax.runtime.event_log.replay import replay_log as replay_log
from rrfp_jax.runtime.event_log.replay import replay_run as replay_run
from rrfp_jax.runtime.event_log.replay import standing as standing
