"""A plain record of a stage's arbiter, from which one made alike can be built anywhere: for event logs."""

from dataclasses import dataclass
from typing import cast

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.groups import LEADER, GroupMember, GroupProtocol, ProposingMember, group_arbiter
from rrfp_jax.core.hints import (
    HINTS,
    SCHEDULE,
    SCHEDULE_WEIGHTS_LAST,
    Consumption,
    Hint,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.core.memory import AheadBound
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.core.plan import StepRules
from rrfp_jax.core.stage_setup import OtherRows, StageSetup
from rrfp_jax.schedules import Pair, PipelineGraph, Placement, Task
from rrfp_jax.schedules.registry import is_in_file, rule_in_file


@dataclass(frozen=True, kw_only=True)
class SavedArbiter:
    """The parts of an arbiter, beside graph and placement; a stage that is one process is a group of one.

    Event logs hold this record, so its fields are part of their format.
    """

    stage: int
    protocol: GroupProtocol
    member: int
    num_members: int
    is_strict: bool
    hint: str
    """The hint's name."""
    row: tuple[Task, ...] | None
    """The stage's row of the table that the hint ranks by, or that is consumed strictly."""
    window: int | None
    """Microbatches; None under strict consumption, and where a footprint counts."""
    capacity: int | None
    """The most that the microbatches held may weigh, in steps with weights."""
    rules: StepRules
    dispatch_ahead: int = 0
    """Always 0. The format of event logs has this key."""
    footprint: int | None
    """The number of activations that the stage may hold, in units."""
    foresight: ForesightRules | None
    read_ahead: tuple[AheadBound, ...]
    """Empty under strict consumption."""
    evaluation_batches: int
    """How many batches a step that evaluates runs; 0: none evaluates."""
    certain_ahead: bool
    """Whether certain choices are handed over early."""
    delay: int = 0
    """How many updates the weights of a step lack; with 1, two steps may be under way."""
    pairs: tuple[tuple[Task, Task], ...] | None = None
    """The entries of a row that is consumed strictly which run as one program; None: the stage joins no tasks."""
    other_rows: tuple[tuple[int, tuple[Task, ...] | None], ...] = ()
    """For steps with other owners: the numbers of microbatches that the stage has had in these, and its table's row for
    each; None: there is no such table."""


def save_arbiter(arbiter: StageArbiter) -> SavedArbiter:
    setup, hint = arbiter.setup, arbiter.setup.consumption.hint
    protocol = GroupProtocol.PROPOSE if isinstance(arbiter, ProposingMember) else GroupProtocol.LEADER
    is_strict = setup.consumption.is_strict
    return SavedArbiter(
        stage=setup.stage,
        protocol=protocol if isinstance(arbiter, GroupMember) else GroupProtocol.OFF,
        member=arbiter.member if isinstance(arbiter, GroupMember) else LEADER,
        num_members=arbiter.num_members if isinstance(arbiter, GroupMember) else 1,
        is_strict=is_strict,
        hint=hint.name,
        row=hint.row,
        window=None if is_strict or setup.footprint is not None else setup.window,
        capacity=setup.capacity,
        rules=setup.rules,
        footprint=setup.footprint,
        foresight=setup.foresight,
        read_ahead=() if is_strict else setup.read_ahead,
        evaluation_batches=setup.evaluation_batches,
        certain_ahead=setup.certain_ahead,
        delay=setup.delay,
        pairs=tuple((a, b) for a, b in sorted(setup.consumption.pairs)) if setup.pairs else None,
        other_rows=tuple(setup.other_rows.made.items()),
    )


def rebuild(
    saved: SavedArbiter, graph: PipelineGraph, placement: Placement, *, rules_file: str | None = None
) -> StageArbiter:
    """Returns a fresh arbiter.

    ``rules_file`` is the Python file that defines the rule if the hint is a user's own. The record names that file too,
    but a record may come from anyone, and loading a rule from a file runs that file.

    Raises ValueError where the parts do not fit together, or the hint is unknown here.
    """
    if not 0 <= saved.stage < placement.num_stages:
        raise ValueError(f"stage {saved.stage} is none of the {placement.num_stages} stages")
    if saved.dispatch_ahead:
        raise ValueError(
            f"stage {saved.stage} was handed {saved.dispatch_ahead} tasks ahead, which no arbiter does: record the run "
            "again, with dispatch_ahead just-in-time"
        )
    has_window = not saved.is_strict and saved.footprint is None
    if (saved.window is not None) != has_window or (saved.window is not None and saved.window < 1):
        raise ValueError(f"stage {saved.stage} has window {saved.window}, which its consumption does not allow")
    setup = StageSetup(
        graph,
        placement,
        saved.stage,
        consumption=_consumption(saved, rules_file),
        window=1 if saved.window is None else saved.window,  # ignored where it is None
        capacity=saved.capacity,
        rules=saved.rules,
        footprint=saved.footprint,
        foresight=saved.foresight,
        read_ahead=saved.read_ahead,
        evaluation_batches=saved.evaluation_batches,
        certain_ahead=saved.certain_ahead,
        other_rows=OtherRows(made=dict(saved.other_rows)),
        delay=saved.delay,
        pairs=saved.pairs is not None,
    )
    if saved.delay:
        return cast(StageArbiter, OverlappedArbiter(setup))
    return group_arbiter(saved.protocol, setup, saved.member, saved.num_members)


def _consumption(saved: SavedArbiter, rules_file: str | None) -> Consumption:
    name, weights_last = saved.hint, saved.hint == SCHEDULE_WEIGHTS_LAST
    if saved.is_strict or weights_last or name == SCHEDULE:
        if saved.row is None:
            raise ValueError(f"stage {saved.stage} lacks the row of the table that it follows")
        if saved.is_strict:
            return strict(saved.row, frozenset(Pair(*pair) for pair in saved.pairs or ()))
        return ready(schedule_hint(saved.row, weights_last=weights_last))
    if name in HINTS:
        return ready(HINTS[name])
    if not is_in_file(name):
        raise ValueError(f"hint {name!r:.200} is unknown: this program has {', '.join(HINTS)}")
    if rules_file is None:
        raise ValueError(
            f"the hint is {name!r:.200}, a rule in a file, and a record's word runs no file: name the file yourself, "
            "with --rules FILE.py"
        )
    return ready(Hint.of(name, rule_in_file(f"{rules_file}:{name.rpartition('.py:')[2]}")))
