"""Configuration of a run beyond model, data and optimizer: the pipeline's layout and order, the run, its evaluations.

Plain records, validated once; nothing here imports JAX, so that bad input is refused before anything is loaded.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields
from rrfp_jax.layout import TENSOR, checked_axes
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.models.vision_config import ENCODER
from rrfp_jax.observe.trackers.config import read_trackers
from rrfp_jax.runtime.jax_environment import check_flags
from rrfp_jax.training.step_profile import parse_steps

AUTO_CUT = "auto"
STRICT_ORDER, FORESIGHT_ORDER, READY_ORDER = ORDERS = ("strict", "foresight", "ready")
_GROUPED = re.compile(r"([\w-]+):(\d{1,5})")
_MEMORY = FieldRule("at least 1 byte", lambda value: isinstance(value, str) or value >= 1)
_INTERVAL = FieldRule("a positive number, or null", POSITIVE.holds)
_ORDER = FieldRule("strict, foresight or ready", lambda value: value in ORDERS)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The cut of the model, its placement, and the order of tasks."""

    num_stages: int
    """Number of stages. Each has devices of its own unless ``run.devices`` is fewer."""
    replicas: int = 1
    """Number of replicas of the whole pipeline. Each takes an equal part of the microbatches."""
    mesh: dict[str, int] | None = None
    """The axes over the devices of a stage with their sizes, innermost first, for example ``{tensor: 2, fsdp: 4}``.
    ``tensor`` shares matrices; ``fsdp`` cuts parameters, gradients, optimizer state and the rows of a microbatch;
    ``expert`` cuts experts and rows; ``context`` cuts the positions of sequences. None: one device."""
    encoder_mesh: dict[str, int] | None = None
    """The axes of the encoder's stages, over as many devices. None: as ``mesh``."""
    layout: str | None = None
    """The cut of the model into chunks, in the form that ``rrfp plan`` prints, such as ``Et*3|t*3|t*2L``; ``auto``
    finds at the start the cut whose fullest stage has least to do. None: chunks of equally many layers."""
    chunks_per_stage: int | None = None
    """Number of chunks of the model on every stage. None: as the schedule has it, else 1."""
    schedule: str | None = None
    """The table of tasks: the name of a schedule, with ``gis:2`` for groups of two microbatches; ``FILE.py:NAME`` for
    one of your own; or the path of a CSV file. None: no table."""
    hint: str | None = None
    """The rule that ranks the ready tasks. None: the schedule where there is one, else ``bf`` (``bf-deep`` with
    several chunks per stage)."""
    consume: str = FORESIGHT_ORDER
    """How stages follow the schedule: ``strict`` keeps to its rows; ``ready`` runs the best ready task; ``foresight``
    does so too, but waits for the next entry of the schedule once that is in sight, and fills the wait. The latter two
    hold no more activations than the schedule, or than ``window`` has room for, and are the same without a
    schedule."""
    window: int | tuple[int, ...] | str | None = None
    """The microbatches that a stage may hold, one number or one per stage, or their memory as ``512MiB``. None: as many
    as the schedule holds under ``foresight`` or ``strict``, else 32."""
    memory_limit: int | str | None = None
    """The memory of each stage, in bytes or as ``16GiB``. None: that of its device, if it is known."""
    offload: int | None = None
    """The microbatches whose activations a stage holds on its devices; the activations that its schedule holds beyond
    these wait for their backwards in host memory. None: nothing is moved."""
    recompute: int | None = None
    """The number of tasks ahead of a backward at which a task of its own computes again the activations that its
    forward did not keep; 0 is right before the backward. None: forwards keep them."""
    remat: str = "none"
    """The activations that backwards recompute: ``none``, ``dots`` (all but matrix products) or ``full``, layer by
    layer; or those that layers keep beside their inputs: ``attention``, ``experts`` or ``attention+experts``."""
    backward: str | None = None
    """How backwards run: as input and weight gradient (``split``) or as one task (``fused``). None: as the schedule or
    the hint has it, else fused."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_stages", "replicas", "chunks_per_stage", "offload")
        check_fields(self, NOT_NEGATIVE, "recompute")
        check_fields(self, _ORDER, "consume")
        check_fields(self, _MEMORY, "memory_limit")
        if self.recompute is not None and self.remat == "full":
            raise ValueError("recompute and remat full both compute forwards again: leave one of them out")
        if self.offload is not None and self.window is not None:  # which may be in bytes
            raise ValueError(
                f"window {self.window} and offload {self.offload} both bound the activations that stages hold on "
                "devices: make window null (--window null)"
            )
        for mesh in (self.mesh, self.encoder_mesh):
            checked_axes(mesh or {})
        if not self.is_auto and self.cut.stages is not None:
            self._check_stages(self.cut.stages)

    def _check_stages(self, stages: tuple[int, ...]) -> None:
        """Raises ValueError where the stages that the layout names contradict other keys."""
        if self.chunks_per_stage is not None:
            raise ValueError("layout says how many chunks a stage has: leave chunks_per_stage out")
        if max(stages) + 1 != self.num_stages:
            raise ValueError(
                f"layout names {max(stages) + 1} stages and num_stages is {self.num_stages}: give both the same number"
            )
        if self.encoder_mesh is not None:
            raise ValueError("encoder_mesh is for stages of the encoder's own: leave it, or @ in layout, out")

    @property
    def is_auto(self) -> bool:
        """Whether the cut is to be found at the start."""
        return self.layout == AUTO_CUT

    @cached_property
    def cut(self) -> ChunkLayout:
        """The layout once it is known; raises ValueError while it is ``auto``."""
        if self.is_auto:
            raise ValueError("layout is auto, which only rrfp train works out: give the layout that it prints")
        return ChunkLayout() if self.layout is None else ChunkLayout.parse(self.layout)

    @property
    def projector_in(self) -> str:
        """Place of the projector, which an automatic cut leaves in the encoder's last chunk."""
        return ENCODER if self.is_auto else self.cut.projector_in

    @property
    def tensor(self) -> int:
        """Number of devices that share the matrices of a layer."""
        return (self.mesh or {}).get(TENSOR, 1)

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole run."""
        return self.num_stages * self.replicas * prod((self.mesh or {}).values())

    @property
    def meshes(self) -> list[dict[str, int]]:
        """The axes of each stage's devices, innermost first."""
        mesh = self.mesh or {TENSOR: 1}
        num_own = 0
        if self.encoder_mesh is not None:
            num_own = 1 if self.is_auto else len(self.cut.encoder_layers or (1,))
        return [self.encoder_mesh or mesh] * num_own + [mesh] * (self.num_stages - num_own)

    @property
    def schedule_and_group(self) -> tuple[str | None, int | None]:
        """The name of the schedule, and the size of its groups of microbatches if it gives one."""
        found = _GROUPED.fullmatch(self.schedule or "")
        return (self.schedule, None) if found is None else (found[1], int(found[2]))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run goes on, where it runs, and the files that it leaves behind."""

    steps: int
    """Number of training steps."""
    seed: int = 0
    """The number that decides the initial parameters and all random keys."""
    init_from: str | None = None
    """The folder of an import (``rrfp convert import``) or of another run, whose parameters this run starts from. None:
    from initial values by ``seed``."""
    run_dir: str | None = None
    """The directory that the run writes to. None: a new folder under ``runs/``, named by the configuration and the
    time."""
    report_every: int = 1
    """The number of steps from one printed line to the next, in place of a terminal's bar. The last step and skipped
    steps are printed too."""
    trackers: tuple[str | dict[str, Any], ...] = ()
    """The trackers that get the rows of ``metrics.jsonl`` too: tensorboard, wandb or mlflow, each by its name or with
    settings, such as ``{wandb: {project: mine, mode: offline}}``. One that fails is left out, and the run goes on."""
    profile_steps: str | None = None
    """The steps of which rank 0 writes a trace for Perfetto and XProf, as ``10:13`` for 10, 11 and 12. None: no
    steps."""
    platform: str | None = None
    """The kind of devices: ``cpu`` takes virtual CPU devices, one per stage. None: the devices that JAX finds, the
    first one for stage 0."""
    devices: int | None = None
    """The number of devices that each process takes, shared evenly by its stages where they are fewer. None: one for
    each stage, replica and mesh position that it hosts."""
    xla_flags: tuple[str, ...] = ()
    """The flags for XLA, each as ``--xla_name=value``; those of the compiler of TPUs begin with ``--xla_tpu_``. The
    environment variables XLA_FLAGS and LIBTPU_INIT_ARGS take precedence."""
    checkpoint_every: int | None = None
    """The number of steps from one checkpoint to the next. None: by time only."""
    checkpoint_minutes: float | None = 30.0
    """The minutes from one checkpoint to the next. A run also saves at its end, and when it is told to stop (SIGTERM).
    None: by steps only."""
    keep_checkpoints: int = 3
    """The number of newest checkpoints that stay."""
    deterministic: bool = False
    """Whether every order of tasks gives the same bits: gradients accumulate in microbatch order, and CPU thread pools
    are pinned."""
    max_skipped_in_row: int | None = 50
    """The number of steps in a row that may be skipped, as loss or gradients are not finite, before the run saves and
    ends with exit code 9. None: any number."""

    def __post_init__(self) -> None:
        check_flags(self.xla_flags)
        check_fields(self, _INTERVAL, "checkpoint_every", "checkpoint_minutes")
        check_fields(self, AT_LEAST_1, "keep_checkpoints", "devices", "max_skipped_in_row")
        read_trackers(self.trackers)
        if self.profile_steps is not None and parse_steps(self.profile_steps).start >= self.steps:
            raise ValueError(
                f"profile_steps is {self.profile_steps}, and the last step is {self.steps - 1}: give steps up to that"
            )
        if self.platform not in (None, "cpu"):
            raise ValueError(
                f"platform is {self.platform!r}: give cpu for virtual devices, or null for the devices that JAX finds"
            )
        check_fields(self, AT_LEAST_1, "steps", "report_every")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}: give a number from 0 to {2**32 - 1}")


_HELD_OUT_SET = "held_out"
"""Name of the only set where none is named: the part of the run's data that is held out."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation during training, on data that is not trained on."""

    every: int | None = None
    """Training steps from one evaluation to the next. None: only after the last step."""
    batches: int = 8
    """Batches of each set, always the same ones, from the first on."""
    sets: dict[str, dict[str, Any]] | None = None
    """By name, the differences from the section of the run's data, for example
    ``{validation: {path: val.txt}}``. A set with a path of its own takes all that is there, others the part of the
    run's data that is held out (``held_out``). None: that part alone."""
    at_start: bool = False
    """Whether to evaluate before the first step too."""
    keep_best: bool = False
    """Whether the checkpoint with the least loss of the first set is saved at once and stays, beside the newest
    ones."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "every", "batches")
        if self.sets is not None and not self.sets:
            raise ValueError("sets is empty, so there is nothing to evaluate on: name one, or leave sets out")

    @property
    def named_sets(self) -> dict[str, dict[str, Any]]:
        """The sets by name, as differences from the section of the run's data."""
        return self.sets or {_HELD_OUT_SET: {}}

    def is_due(self, step: int, num_steps: int) -> bool:
        """Returns whether to evaluate after ``step`` steps of a run of ``num_steps``."""
        if not step:
            return self.at_start
        return step == num_steps or (self.every is not None and step % self.every == 0)
