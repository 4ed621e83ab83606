"""A user's options about updates and about running: two records, each checked once."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.core import Agreement, GroupProtocol, StepRules, check_delay
from rrfp_jax.core.dispatch import AUTO, DISPATCH_WORDS, PAIRS, is_dispatch
from rrfp_jax.core.replicas import ReduceWay, SparseAveraging, reduce_way
from rrfp_jax.field_rules import check_types
from rrfp_jax.programs.agreement import check_clip_norm
from rrfp_jax.readable import parse_bytes
from rrfp_jax.runtime.stage_threads import StageExecutor

Pieces = Callable[[int], Iterable[Callable[[], Any]]]
"""Makes the pieces of other work of a stage, from the stage's number."""


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """The treatment of a step's gradients. Raises ValueError on values that cannot be meant."""

    clip_norm: float | None = None
    """Largest global norm of the gradient of the mean loss; None: gradients are not scaled."""
    skip_nonfinite: bool = True
    """Leave out, on all stages, a step whose loss or gradients are not finite, whose update cannot be finite because of
    the learning rate (:mod:`rrfp_jax.programs.update_functions`), or which has no weight at all, or a negative one."""
    spike_deviations: float | None = None
    """Leave out, on all stages, a step whose gradient norm is more than so many standard deviations above the mean of
    the norms before it (:class:`rrfp_jax.programs.agreement.NormHistory`); None: none for that."""
    spike_window: int = 128
    """Number of norms that tell a spike."""
    deterministic: bool = False
    """Give the same bits in any order of tasks, at the price of accumulating in microbatch order. Refused if the
    machine's own sums are not reproducible."""
    shard_optimizer: bool = False
    """Divide the optimizer state among the replicas (ZeRO-1)."""
    reduce: ReduceWay | str | SparseAveraging | Mapping[str, Any] = ReduceWay.AUTO
    """The way in which replicas add up their gradients: ``auto``, ``messages`` or ``collective``. With ``messages``
    each unit must lie in one process; a sharded optimizer state is cut by whole arrays, and two replicas hold each.
    Or how replicas average their parameters instead, by messages too (:class:`.SparseAveraging`)."""

    delay: int | str = 0
    """With 1, a step takes its gradients at the parameters before the last update, so that the tasks of the next step
    fill the end of each (:mod:`rrfp_jax.core.overlap`). That changes what is learnt; 0: every step flushes. With
    ``by-stage`` the last stage takes its gradients at the newest parameters."""

    def __post_init__(self) -> None:
        check_types(self)
        check_clip_norm(self.clip_norm)
        check_delay(self.delay)
        object.__setattr__(self, "reduce", reduce_way(self.reduce))
        refused = {"shard_optimizer": self.shard_optimizer, "spike_deviations": self.spike_deviations is not None}
        refused["a delay"] = bool(self.delay)
        for words, is_given in refused.items() if self.sparse is not None else ():
            if is_given:
                raise ValueError(
                    f"replicas that average a share of their parameters do not go with {words}: leave it out"
                )
        if self.delay and (self.shard_optimizer or self.reduce == ReduceWay.MESSAGES):
            raise ValueError(
                f"steps that overlap (delay {self.delay}) share no optimizer state and do not add up by messages: "
                "leave out shard_optimizer, and reduce messages"
            )
        if not (self.spike_deviations is None or 0 < self.spike_deviations < math.inf):
            raise ValueError(f"spike_deviations is {self.spike_deviations}: give a positive number, such as 6, or None")
        if self.delay and self.spike_deviations is not None:
            raise ValueError("steps that overlap (delay 1) are not judged: leave spike_deviations or the delay out")
        if self.spike_window < 2:
            raise ValueError(f"spike_window is {self.spike_window}: give 2 or more norms")

    @property
    def sparse(self) -> SparseAveraging | None:
        """How replicas average their parameters; None: they add up gradients, and stay equal."""
        return self.reduce if isinstance(self.reduce, SparseAveraging) else None

    def by_messages(self, num_replicas: int) -> bool:
        """Returns whether so many replicas add up, or average, by messages."""
        return num_replicas > 1 and (self.reduce == ReduceWay.MESSAGES or self.sparse is not None)

    def num_shares(self, num_replicas: int) -> int:
        """Returns into how many shares replicas that add up by messages cut the optimizer state; 1: it is whole.

        Two replicas hold each share, so there is nothing to cut for two.
        """
        return num_replicas if self.shard_optimizer and self.by_messages(num_replicas) and num_replicas > 2 else 1

    def shards_together(self, num_replicas: int) -> bool:
        """Returns whether a collective updates the optimizer state, each array of which is cut over the replicas."""
        return self.shard_optimizer and not self.by_messages(num_replicas)

    @property
    def needs_norm(self) -> bool:
        """Whether every stage must report before any may update."""
        return self.clip_norm is not None or self.skip_nonfinite or self.spike_deviations is not None

    def step_rules(self, num_replicas: int) -> StepRules:
        """Returns the consequences of these rules for the order of tasks."""
        agreement = Agreement.ALL if self.needs_norm else Agreement.LOSS
        by_messages = self.by_messages(num_replicas)
        return StepRules(
            ordered=self.deterministic,
            agreement=agreement,
            lockstep=num_replicas > 1 and not by_messages,
            by_messages=by_messages,
            shares=self.num_shares(num_replicas) > 1,
        )


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """The way in which the stages run, without effect on the results. Raises ValueError on values that cannot be
    meant."""

    memory_limit: int | str | None = None
    """Memory that each stage may take, in bytes or as ``16GiB``; None: that of its device, if it is known. A run that
    is predicted to need more is refused before its first step."""
    dispatch_ahead: int | str = AUTO
    """The time at which a stage is handed its next task. ``certain``: once no possible event changes the choice.
    ``just-in-time``: likewise, and any other when the running one may end within the host's latency. ``auto``:
    ``certain`` on CPU devices, elsewhere ``just-in-time``. 0: at the end of the running one. ``pairs``:
    ``just-in-time``, on CPU devices 0, and two ready tasks at once where they can run as one program, F of one
    microbatch and B, I or W of another: the collectives of each then hide behind the work of the other, which pays
    where tensors are cut over devices."""
    group_protocol: GroupProtocol | str = GroupProtocol.LEADER
    """The way in which the processes of one stage choose the next task: ``leader`` or ``propose``."""
    progress_deadline_s: float = 600.0
    """Time without a finished task after which the run is given up with a report; longer than any task."""
    log_steps: int = 2
    """Number of steps of each stage's event log that are kept."""
    max_programs: int = 1000
    """Number of programs that this process may compile. A run whose buckets need more is refused at once."""
    other_owners: bool = False
    """Whether steps may have other owners of their microbatches than the blocks of replicas. All replicas of
    neighbouring stages are connected then."""
    wrap_stage: Callable[[StageExecutor], StageExecutor] | None = None
    """Wrapper around every stage's executor, for example :class:`rrfp_jax.testing.DelayedStage`."""
    pieces: Pieces | None = None
    """Makes each stage's pieces of other work: short calls that it makes one after the other where it would idle
    (:class:`rrfp_jax.runtime.stage_threads.PieceThread`). Their memory comes on top of the forecast."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.group_protocol not in tuple(GroupProtocol):
            raise ValueError(f"group_protocol is {self.group_protocol!r}: give {', '.join(GroupProtocol)}")
        if not is_dispatch(self.dispatch_ahead):
            raise ValueError(f"dispatch_ahead is {self.dispatch_ahead!r}: give {DISPATCH_WORDS}")
        if self.dispatch_ahead == PAIRS and self.group_protocol == GroupProtocol.PROPOSE:
            raise ValueError(
                f"members that propose agree on single tasks: for pairs take group_protocol {GroupProtocol.LEADER}"
            )
        if (limit := self.memory_limit_bytes) is not None and limit < 1:
            raise ValueError(f"memory_limit is {self.memory_limit}: give at least 1 byte")
        if self.max_programs < 1:
            raise ValueError(f"max_programs is {self.max_programs}: give at least 1")
        if not 0 < self.progress_deadline_s < math.inf:
            raise ValueError(f"progress_deadline_s is {self.progress_deadline_s}: give a positive number of seconds")
        if self.log_steps < 1:
            raise ValueError(f"log_steps is {self.log_steps}: keep the event log of at least 1 step")

    @property
    def memory_limit_bytes(self) -> int | None:
        limit = self.memory_limit
        return parse_bytes(limit, "memory_limit") if isinstance(limit, str) else limit
