"""Configuration of a run beyond model, data and optimizer: the pipeline's layout and order, the run, its evaluations.

Plain records, validated once; nothing here imports JAX, so that bad input is refused before anything is loaded.
"""

from dataclasses import dataclass
from typing import Any

from rrfp_jax.byte_sizes import parse_bytes
from rrfp_jax.core.dispatch import AUTO, DISPATCH_WORDS, is_dispatch
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SECONDS, Rule, check_fields
from rrfp_jax.layout import TENSOR, checked_axes
from rrfp_jax.models.cuts import AUTO_CONTEXT, CONTEXT_ATTENTIONS
from rrfp_jax.models.encoder_config import PROJECTOR_PLACES
from rrfp_jax.observe.trackers.config import check_trackers
from rrfp_jax.runtime.jax_environment import check_flags
from rrfp_jax.training.step_profile import parse_steps

_TRANSPORT = Rule("auto, sockets or transfer", lambda value: value in ("auto", "sockets", "transfer"))
_PROTOCOL = Rule("leader or propose", lambda value: value in ("leader", "propose"))
_MEMORY = Rule("at least 1 byte", lambda value: isinstance(value, str) or value >= 1)
_TASKS = Rule(DISPATCH_WORDS, is_dispatch)
_NORM = Rule("a positive number, or null for no clipping", POSITIVE.holds)
_INTERVAL = Rule("a positive number, or null", POSITIVE.holds)
_CACHE = Rule(
    "auto, none, or the absolute path of a directory",
    lambda value: value in ("auto", "none") or value[:1] in ("/", "~"),
)
AUTO_CUT = "auto"
_CUT = Rule("the layers of each chunk, or auto", lambda value: not isinstance(value, str) or value == AUTO_CUT)
_CONTEXT = Rule(", ".join(CONTEXT_ATTENTIONS), lambda value: value in CONTEXT_ATTENTIONS)
_PROJECTOR = Rule(", ".join(PROJECTOR_PLACES), lambda value: value in PROJECTOR_PLACES)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The cut of the model, its placement, and the order of tasks."""

    num_stages: int
    """Stages, each on devices of its own unless ``run.devices`` is fewer."""
    data: int = 1
    """Replicas of the whole pipeline, each with an equal part of the microbatches."""
    tensor: int = 1
    """Devices that share every layer of a stage."""
    mesh: dict[str, int] | None = None
    """All axes over the devices of a stage with their sizes, innermost first, in place of ``tensor``: ``tensor`` shares
    matrices; ``fsdp`` cuts parameters, gradients, optimizer state and the rows of a microbatch; ``expert`` rows;
    ``context`` the positions of sequences. For example ``{tensor: 2, fsdp: 4}``."""
    context_attention: str = AUTO_CONTEXT
    """How attention looks at positions of other devices of ``context``: their keys and values are gathered before it
    (``gather``), or passed from neighbour to neighbour while it computes (``ring``); ``auto`` takes the ring where the
    gathered ones of a layer were larger than its part of the residual stream."""
    encoder_mesh: dict[str, int] | None = None
    """Axes of the encoder's stages where they differ, with as many devices; None: as ``mesh``."""
    shard_optimizer: bool = False
    """Share the optimizer state out to the replicas (ZeRO-1); needs ``data`` of at least 2."""
    chunks_per_stage: int | None = None
    """Chunks of the model on every stage; None: as the schedule has it, else 1."""
    layers_per_chunk: tuple[int, ...] | str | None = None
    """Decoder layers of each chunk; ``auto``: as many as give the fullest stage least to do, worked out at the start,
    and so for an encoder; None: the same number everywhere."""
    costs: str | None = None
    """A file of what layers cost (``rrfp profile``), for ``layers_per_chunk: auto``; None: worked out from their
    operations and bytes."""
    embedding_chunk: int = 0
    """The chunk that holds the embedding."""
    head_chunk: int = -1
    """The chunk that holds the head and computes the loss; negative numbers count from the end. Beside an encoder the
    decoder's chunks are counted."""
    encoder_layers_per_chunk: tuple[int, ...] | None = None
    """Layers of each chunk of the encoder; None: as many as it has stages, with about the same number each."""
    encoder_stages: int | None = None
    """How many stages, the first ones, the encoder has for itself; None: one for each of its chunks, or 1. With
    ``stage_of_chunk`` how many chunks it has, unless ``encoder_layers_per_chunk`` says that."""
    projector_in: str = "encoder"
    """Place of the projector: ``encoder``, the encoder's last chunk; ``own``, a chunk of its own; ``decoder``, the
    decoder's first chunk."""
    stage_of_chunk: tuple[int, ...] | None = None
    """The stage of every chunk, the encoder's first, where they are to lie otherwise: encoder and decoder may share
    stages. None: one chunk after another on the stages in turn."""
    freeze: tuple[str, ...] = ()
    """Layers that never change: names, what stands before a dot in names (``vision``), or globs."""
    schedule: str | None = None
    """A schedule's name, ``FILE.py:NAME`` of your own, or the path of a CSV table; None: no table."""
    schedule_hash: str | None = None
    """The hash of that table's rows, as ``rrfp plan --write`` notes it: another table is refused; None: whatever the
    schedule's name or path stands for is taken."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the stage's next one, for schedules with such groups (``gis``); None:
    as few as the schedule allows."""
    consume: str = "ready"
    """``ready`` runs the best of the ready tasks, ``strict`` follows the schedule's table."""
    hint: str | None = None
    """Ranks the ready tasks; None: the schedule where there is one, else ``bf`` (``bf-deep`` with several chunks)."""
    window: int | tuple[int, ...] | str | None = None
    """Microbatches that a stage may hold, one number or one per stage, or their memory as ``512MiB``; None: what a
    schedule that ranks what is ready holds itself, else 32."""
    footprint: bool | None = None
    """Hold no more activations than the schedule that ranks what is ready, or than ``window`` has room for; false:
    ``window`` bounds microbatches; None: true where there is such a schedule."""
    foresight: bool | None = None
    """Wait for the next entry of the schedule that ranks what is ready once that is in sight, and fill the wait; false:
    start whatever is ready; None: true where there is such a schedule."""
    read_ahead: int | None = None
    """Microbatches that a chunk without a backward, such as a frozen encoder, may have produced that others have not
    taken yet; None: twice what the stages that read it may hold."""
    offload: int | None = None
    """Microbatches whose activations a stage holds on its devices; what its schedule holds beyond that waits for its
    backward in host memory; None: nothing is moved."""
    recompute: int | None = None
    """How many tasks ahead of a backward what its forward did not keep is computed again, in a task of its own, 0 for
    right before it; None: forwards keep it."""
    remat: str = "none"
    """Activations that backwards recompute: ``none``, ``dots`` (all but matrix products) or ``full``, layer by layer;
    or those that layers keep beside their inputs: ``attention``, ``experts`` or ``attention+experts``."""
    memory_limit: int | str | None = None
    """Memory of each stage, in bytes or as ``16GiB``; None: what its device has, if that is known."""
    backward: str | None = None
    """Run backwards as input and weight gradient (``split``) or as one task (``fused``); None: what the schedule or the
    hint calls for, otherwise fused."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None: no clipping."""
    skip_nonfinite: bool = True
    """Leave out steps whose loss or gradients are not finite."""
    max_skipped_in_row: int | None = 50
    """Number of steps that may be left out one after another before the run saves and ends with exit code 9; None: any
    number."""
    deterministic: bool = False
    """The same bits for every order of tasks: gradients accumulate in microbatch order, CPU thread pools are pinned."""
    dispatch_ahead: int | str = AUTO
    """When a stage is handed its next task: ``just-in-time``, ``certain``, ``auto``, or 0. Just-in-time is when the
    running one may end within the host's latency; certain is when nothing can change the choice any more; auto is
    certain on CPU devices and just-in-time elsewhere; 0 is at the end of the running one."""
    progress_deadline_s: float = 600.0
    """How long no task may finish before the run is given up with a report."""
    transport: str = "auto"
    """How tensors travel between processes: through host memory (``sockets``), by JAX's transfer server, not encrypted
    (``transfer``), or by what suits (``auto``). Sockets work everywhere. Auto takes transfer on accelerators, where
    arrays need not be encrypted, between those where an exchange at the start shows that it works."""
    group_protocol: str = "leader"
    """How the processes of a stage that spans several agree on the next task: by a leader, or all proposing."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_stages", "data", "tensor", "chunks_per_stage", "group_size", "offload")
        check_fields(self, AT_LEAST_1, "encoder_stages", "max_skipped_in_row")
        check_fields(self, NOT_NEGATIVE, "recompute")
        if self.recompute is not None and self.remat == "full":
            raise ValueError("recompute and remat full both compute forwards again: leave one of them out")
        check_fields(self, _PROJECTOR, "projector_in")
        check_fields(self, _CONTEXT, "context_attention")
        check_fields(self, _CUT, "layers_per_chunk")
        if self.costs is not None and self.layers_per_chunk != AUTO_CUT:
            raise ValueError("costs are for layers_per_chunk auto: give that too, or leave costs out")
        if self.stage_of_chunk is not None:
            self._check_placement(self.stage_of_chunk)
        if self.offload is not None and self.window is not None:  # which may be in bytes
            raise ValueError(
                f"window {self.window} and offload {self.offload} both bound what stages hold on devices: make window "
                "null (--window null)"
            )
        self._check_mesh()
        check_fields(self, _TRANSPORT, "transport")
        check_fields(self, _PROTOCOL, "group_protocol")
        if self.shard_optimizer and self.data == 1:
            raise ValueError("shard_optimizer shares the optimizer state out to replicas: give data at least 2")
        check_fields(self, _MEMORY, "memory_limit")
        check_fields(self, SECONDS, "progress_deadline_s")
        check_fields(self, _TASKS, "dispatch_ahead")
        check_fields(self, _NORM, "clip_norm")

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """``layers_per_chunk`` once it is known; raises ValueError while it is ``auto``."""
        if isinstance(self.layers_per_chunk, str):
            raise ValueError("layers_per_chunk is auto, which only rrfp train works out: give the numbers")
        return self.layers_per_chunk

    def _check_mesh(self) -> None:
        for mesh in (self.mesh, self.encoder_mesh):
            checked_axes(mesh or {})
        if self.mesh is not None and self.tensor > 1:
            raise ValueError("tensor and mesh both say what a stage's devices are: give tensor in mesh alone")
        if self.encoder_mesh is not None and self.stage_of_chunk is not None:
            raise ValueError(
                "encoder_mesh is for stages of the encoder's own: leave stage_of_chunk or encoder_mesh out"
            )

    @property
    def meshes(self) -> list[dict[str, int]]:
        """The axes of each stage's devices, innermost first."""
        mesh = self.mesh or {TENSOR: self.tensor}
        num_own = (
            0 if self.encoder_mesh is None else self.encoder_stages or len(self.encoder_layers_per_chunk or ()) or 1
        )
        return [self.encoder_mesh or mesh] * num_own + [mesh] * (self.num_stages - num_own)

    def _check_placement(self, stages: tuple[int, ...]) -> None:
        if self.chunks_per_stage is not None:
            raise ValueError("stage_of_chunk says how many chunks a stage has: leave chunks_per_stage out")
        if min(stages, default=-1) < 0:
            raise ValueError(f"stage_of_chunk is {list(stages)}: give the stage of every chunk, from 0")
        if max(stages) + 1 != self.num_stages:
            raise ValueError(
                f"stage_of_chunk names {max(stages) + 1} stages and num_stages is {self.num_stages}: give both the "
                "same number"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run goes on and what it leaves behind."""

    steps: int
    """Number of training steps."""
    seed: int = 0
    """Decides the initial parameters and all random keys."""
    init_from: str | None = None
    """The folder of an import (``rrfp convert import``) or of another run, whose parameters this run starts from; None:
    from initial values by ``seed``."""
    run_dir: str | None = None
    """Directory that the run writes to; None: a new folder under ``runs/``, named by the configuration and the time."""
    report_every: int = 1
    """Every so many steps a line is printed, in place of a terminal's bar; also for the last one and those left out."""
    trackers: tuple[str, ...] = ()
    """Trackers that get the rows of ``metrics.jsonl`` too: some of csv, tensorboard, wandb, mlflow. One that fails is
    left out, and the run goes on. Their settings are in the section ``tracking``."""
    profile_steps: str | None = None
    """Steps of which a trace for Perfetto and XProf is written, as ``10:13`` for 10, 11 and 12; None: none."""
    profile_ranks: tuple[int, ...] | None = (0,)
    """The ranks that write one; None: all."""
    timeline_steps: int = 1
    """How many of the last steps the timeline shows."""
    platform: str | None = None
    """``cpu``: virtual CPU devices, one per stage; None: the devices that JAX finds, the first one for stage 0."""
    devices: int | None = None
    """Devices that each process takes, evenly shared by its stages where they are fewer; None: one for each stage,
    replica and tensor part that it hosts."""
    xla_flags: tuple[str, ...] = ()
    """Flags for XLA, each as ``--xla_name=value``; those of TPUs' compiler begin with ``--xla_tpu_``. What the
    environment variables XLA_FLAGS and LIBTPU_INIT_ARGS say of the same names goes before them."""
    checkpoint_every: int | None = None
    """Save after every so many steps; None: by time only."""
    checkpoint_minutes: float | None = 30.0
    """Save when so many minutes have passed since the last time; None: by steps only. A run also saves at its end, and
    when it is told to stop (SIGTERM)."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay."""
    compile_cache: str = "auto"
    """Directory of compiled programs for later starts: ``auto`` (the user's cache directory), ``none``, or an
    absolute path. The environment variable RRFP_COMPILE_CACHE goes before it."""
    compile_cache_size: int | str = "4GiB"
    """About how much is kept there, in bytes or as ``4GiB``; what was not used for longest goes first."""

    def __post_init__(self) -> None:
        check_fields(self, _CACHE, "compile_cache")
        check_flags(self.xla_flags)
        check_fields(self, _MEMORY, "compile_cache_size")
        if isinstance(self.compile_cache_size, str):
            parse_bytes(self.compile_cache_size, "compile_cache_size")
        check_fields(self, _INTERVAL, "checkpoint_every", "checkpoint_minutes")
        check_fields(self, AT_LEAST_1, "keep_checkpoints", "devices")
        check_trackers(self.trackers)
        if self.profile_steps is not None and parse_steps(self.profile_steps).start >= self.steps:
            raise ValueError(
                f"profile_steps is {self.profile_steps}, and the last step is {self.steps - 1}: give steps up to that"
            )
        if self.platform not in (None, "cpu"):
            raise ValueError(
                f"platform is {self.platform!r}: give cpu for virtual devices, or null for the devices that JAX finds"
            )
        check_fields(self, AT_LEAST_1, "steps", "timeline_steps", "report_every")
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
