"""Configuration of a run beyond model and data: pipeline and order, the run, its evaluations, the optimizer.

Plain records, validated once; nothing here imports JAX, so that bad input is refused before anything is loaded.

Each optimizer takes some arguments; one of another optimizer is refused, and one that is not given gets its default. A
resolved configuration therefore has every number that counts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rrfp_jax.core import check_delay
from rrfp_jax.core.replicas import ReduceWay, reduce_way
from rrfp_jax.costs.layer_sizes import remat_rule
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields, fill_fields
from rrfp_jax.layout import TENSOR, checked_axes
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.models.vision_config import ENCODER
from rrfp_jax.observe.trackers import read_trackers
from rrfp_jax.readable import shown
from rrfp_jax.runtime.jax_environment import check_flags
from rrfp_jax.schedules import Placement

AUTO_CUT = "auto"
STRICT_ORDER, FORESIGHT_ORDER, READY_ORDER = ORDERS = ("strict", "foresight", "ready")
_MEMORY = FieldRule("at least 1 byte", lambda value: isinstance(value, str) or value >= 1)
_INTERVAL = FieldRule("a positive number, or null", POSITIVE.holds)
_PAIRS = "+pairs"
_ORDER = FieldRule(
    f"strict, foresight or ready, perhaps with {_PAIRS}", lambda value: value.removesuffix(_PAIRS) in ORDERS
)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The cut of the model, its placement, and the order of tasks."""

    num_stages: int
    """Number of stages. Each has devices of its own unless ``run.devices`` is fewer."""
    replicas: int | tuple[int, ...] = 1
    """Number of replicas of the whole pipeline. Each takes an equal part of the microbatches. Or a number for each
    stage, whose replicas take equal parts; these need ``reduce: messages``."""
    reduce: str | dict[str, Any] = "auto"
    """How replicas add up gradients: by ``messages`` while backwards still run, for stages that each lie in one process
    per replica, or by a ``collective``. ``auto`` chooses the collective. With ``messages`` a run goes on without ranks
    that are lost, as long as a replica of each stage is left. ``{share: 0.05, tau: 3}`` leaves gradients apart: each
    step averages that share of the parameters, and a step ``tau`` later takes it over, which changes what is learnt
    (docs/parallelism.md)."""
    mesh: dict[str, int] | None = None
    """The axes over the devices of a stage with their sizes, innermost first, for example ``{tensor: 2, fsdp: 4}``.
    ``tensor`` shares matrices; ``fsdp`` cuts parameters, gradients, optimizer state and the rows of a microbatch;
    ``expert`` cuts experts and rows; ``context`` cuts the positions of sequences. None: one device."""
    encoder_mesh: dict[str, int] | None = None
    """The axes of the encoder's stages, over as many devices. None: as ``mesh``."""
    layout: str | None = None
    """The cut of the model into chunks, in the form that ``rrfp plan`` prints, such as ``Et*3|t*3|t*2L``, or with
    ``<|>`` between the attention and the MLP of a layer; ``auto`` finds at the start the cut whose fullest stage has
    least to do. None: chunks of equally many layers."""
    chunks_per_stage: int | None = None
    """Number of chunks of the model on every stage. None: as the schedule has it, else 1."""
    schedule: str | None = None
    """The table of tasks: the name of a schedule, with ``gis:2`` for groups of two microbatches and ``seq1f1b:4`` for
    four slices of every sequence, which take equally long, or with ``seq1f1b:4:equal`` have equal lengths;
    ``vocabulary`` gives every stage a part of embedding and head; ``FILE.py:NAME`` for one of your own; or the path of
    a CSV file. None: no table."""
    hint: str | None = None
    """The rule that ranks the ready tasks. None: the schedule where there is one, else ``bf`` (``bf-deep`` with
    several chunks per stage)."""
    consume: str = FORESIGHT_ORDER
    """How stages follow the schedule: ``strict`` keeps to its rows; ``ready`` runs the best ready task; ``foresight``
    does so too, but waits for the next entry of the schedule once that is in sight, and fills the wait. The latter two
    hold no more activations than the schedule, or than ``window`` has room for, and are the same without a
    schedule. With ``foresight+pairs``, or another of them, a stage runs two ready tasks as one program where it can,
    which hides the sums of ``tensor``."""
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
    remat: str | tuple[str, ...] = "none"
    """The activations that backwards recompute: ``none``, ``dots`` (all but matrix products) or ``full``, layer by
    layer; or those that layers keep beside their inputs: ``attention``, ``experts`` or ``attention+experts``. One for
    all, or one per stage or chunk."""
    backward: str | None = None
    """How backwards run: as input and weight gradient (``split``) or as one task (``fused``). None: as the schedule or
    the hint has it, else fused."""
    delay: int | str = 0
    """The number of updates that the weights of a step lack: 0, 1, or ``by-stage``, which is 0 on the last stage and 1
    on all others. With 1 the next step's tasks fill the end of each step, so that no bubble is left; that changes what
    is learnt (docs/orders.md)."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "num_stages", "chunks_per_stage", "offload")
        check_fields(self, _ORDER, "consume")
        self._check_delay()
        self._check_pairs()
        self._check_replicas()
        check_fields(self, NOT_NEGATIVE, "recompute")
        check_fields(self, _MEMORY, "memory_limit")
        reduce_way(self.reduce)  # which refuses what cannot be meant
        for name in self.remats:
            remat_rule(name)
        if not self.remats:
            raise ValueError("remat is an empty list: give one value for all, or one for each stage")
        if self.recompute is not None and "full" in self.remats:
            raise ValueError("recompute and remat full both compute forwards again: leave one of them out")
        if self.offload is not None and self.window is not None:  # which may be in bytes
            raise ValueError(
                f"window {self.window} and offload {self.offload} both bound the activations that stages hold on "
                "devices: make window null (--window null)"
            )
        for mesh in (self.mesh, self.encoder_mesh):
            checked_axes(mesh or {})
        if self.is_auto or self.cut.stages is None:
            return
        # The layout names stages, which must not contradict other keys.
        if self.chunks_per_stage is not None:
            raise ValueError("layout says how many chunks a stage has: leave chunks_per_stage out")
        if (num_stages := max(self.cut.stages) + 1) != self.num_stages:
            raise ValueError(
                f"layout names {num_stages} stages and num_stages is {self.num_stages}: give both the same number"
            )
        if self.encoder_mesh is not None:
            raise ValueError("encoder_mesh is for stages of the encoder's own: leave it, or @ in layout, out")

    def _check_delay(self) -> None:
        check_delay(self.delay)
        refused = {
            "consume strict": self.consumption == STRICT_ORDER,
            "pairs of tasks": self.makes_pairs,
            "offload": self.offload is not None,
            "recompute": self.recompute is not None,
            "a window in bytes": isinstance(self.window, str),
            "reduce messages, or a share": self.by_messages,
        }
        for words, is_given in refused.items() if self.delay else ():
            if is_given:
                raise ValueError(
                    f"steps that overlap (delay {self.delay}) do not go with {words}: leave out one of them"
                )

    def _check_replicas(self) -> None:
        if isinstance(self.replicas, int):
            check_fields(self, AT_LEAST_1, "replicas")
            return
        if len(self.replicas) != self.num_stages or min(self.replicas) < 1:
            raise ValueError(
                f"replicas is {shown(self.replicas)}: give one number for all, or 1 or more for each of "
                f"{self.num_stages} stages"
            )
        if len({*self.replicas}) == 1:
            object.__setattr__(self, "replicas", self.replicas[0])
        elif self.reduce != ReduceWay.MESSAGES or self.consumption == STRICT_ORDER:
            raise ValueError(
                "stages with different replicas hand microbatches to each other, and add up gradients by messages: "
                "give reduce messages, and consume foresight or ready"
            )

    def _check_pairs(self) -> None:
        if self.makes_pairs and (self.offload is not None or self.recompute is not None):
            raise ValueError(
                f"pairs of tasks do not go with offload or recompute, whose tasks have their own time: leave out "
                f"{_PAIRS} of consume, or the other"
            )

    @property
    def consumption(self) -> str:
        """``strict``, ``foresight`` or ``ready``."""
        return self.consume.removesuffix(_PAIRS)

    @property
    def makes_pairs(self) -> bool:
        """Whether stages run two ready tasks as one program where they can."""
        return self.consume.endswith(_PAIRS)

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas of any stage."""
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas)

    @property
    def by_messages(self) -> bool:
        """Whether replicas add up, or average, by messages."""
        return self.reduce == ReduceWay.MESSAGES or isinstance(self.reduce, dict)

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

    @cached_property
    def named_schedule(self) -> tuple[str | None, int | None, bool]:
        """The schedule without the number behind its name, that number, and whether slices have equal lengths."""
        found = re.fullmatch(r"([\w-]+):(\d{1,5})(:equal)?", self.schedule or "")
        return (self.schedule, None, False) if found is None else (found[1], int(found[2]), found[3] is not None)

    @property
    def remats(self) -> tuple[str, ...]:
        """Every value of ``remat`` once."""
        return tuple(dict.fromkeys([self.remat] if isinstance(self.remat, str) else self.remat))

    def chunk_remats(self, placement: Placement) -> tuple[str, ...]:
        """Returns the value of ``remat`` for each chunk; raises ValueError for a list of another length."""
        stages, chunks = placement.num_stages, placement.num_chunks
        given = self.remat
        if isinstance(given, str):
            return (given,) * chunks
        if len(given) == stages:
            return tuple(given[stage] for stage in placement.stage_of_chunk)
        if len(given) != chunks:
            of_chunks = "" if chunks == stages else f" or {chunks} chunks"
            raise ValueError(
                f"remat has {len(given)} values: give one for all, or one for each of {stages} stages{of_chunks}"
            )
        return given

    @property
    def tensor(self) -> int:
        """Number of devices that share the matrices of a layer."""
        return (self.mesh or {}).get(TENSOR, 1)

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole run."""
        units = self.num_stages * self.replicas if isinstance(self.replicas, int) else sum(self.replicas)
        return units * math.prod((self.mesh or {}).values())

    @property
    def meshes(self) -> list[dict[str, int]]:
        """The axes of each stage's devices, innermost first."""
        mesh = self.mesh or {TENSOR: 1}
        num_own = 0
        if self.encoder_mesh is not None:
            num_own = 1 if self.is_auto else len(self.cut.encoder_layers or (1,))
        return [self.encoder_mesh or mesh] * num_own + [mesh] * (self.num_stages - num_own)


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
    devices: int | tuple[int, ...] | None = None
    """The number of devices that each process takes, shared evenly by its stages where they are fewer; or all devices
    of the run, by their numbers, in the order in which stages take them, as ``2,0,3,1``. None: one for each stage,
    replica and mesh position that it hosts."""
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
    verify_every: int | None = None
    """The number of steps from one verification to the next: all replicas run the same microbatch, and results that
    differ in any bit end the run with exit code 10. A single replica runs it twice. None: there is none."""
    max_skipped_in_row: int | None = 50
    """The number of steps in a row that may be skipped, as loss or gradients are not finite or norms are spikes, before
    the run saves and ends with exit code 9. None: any number."""

    def __post_init__(self) -> None:
        check_flags(self.xla_flags)
        check_fields(self, _INTERVAL, "checkpoint_every", "checkpoint_minutes")
        check_fields(self, AT_LEAST_1, "keep_checkpoints", "verify_every", "max_skipped_in_row")
        if not isinstance(self.devices, tuple):
            check_fields(self, AT_LEAST_1, "devices")
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


def parse_steps(text: str) -> range:
    """Returns ``a:b`` as the steps from a on up to but not including b; raises ValueError for anything else."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"profile_steps is {text!r}: give the first step and the one behind the last, such as 10:13")
    return range(int(first), int(last))


_HELD_OUT_SET = "held_out"
"""Name of the only set where none is named: the part of the run's data that is held out."""


_WHEN = ("between", "start", "idle", "start+idle")


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
    when: str = "between"
    """The time of evaluations: ``between`` steps; at the ``start`` too, before the first one; ``idle``, beside the
    steps that follow, where stages would idle, on a copy of the parameters, with rows that come later; ``start+idle``
    for both."""
    keep_best: bool = False
    """Whether the checkpoint with the least loss of the first set is saved at once and stays, beside the newest
    ones."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "every", "batches")
        if self.when not in _WHEN:
            raise ValueError(f"when is {self.when!r}: give {', '.join(_WHEN)}")
        if self.in_idle_time and self.keep_best:
            raise ValueError("keep_best saves a state at once, and in idle time its loss is known later: leave one out")
        if self.sets is not None and not self.sets:
            raise ValueError("sets is empty, so there is nothing to evaluate on: name one, or leave sets out")

    @property
    def named_sets(self) -> dict[str, dict[str, Any]]:
        """The sets by name, as differences from the section of the run's data."""
        return self.sets or {_HELD_OUT_SET: {}}

    @property
    def in_idle_time(self) -> bool:
        """Whether evaluations run beside training, where stages would idle."""
        return self.when.endswith("idle")

    def is_due(self, step: int, num_steps: int) -> bool:
        """Returns whether to evaluate after ``step`` steps of a run of ``num_steps``."""
        if not step:
            return self.when.startswith("start")
        return step == num_steps or (self.every is not None and step % self.every == 0)


# -- the optimizer -----------------------------------------------------------------------------------------------------

ADAMW, LION, SGD, MUON, ADAFACTOR = "adamw", "lion", "sgd", "muon", "adafactor"
CONSTANT, COSINE, LINEAR, STABLE = "constant", "cosine", "linear", "warmup-stable-decay"

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    ADAMW: {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "nesterov": False, "weight_decay": 0.1},
    LION: {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1},
    SGD: {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    MUON: {
        "momentum": 0.95,
        "nesterov": True,
        "newton_schulz_steps": 5,
        "consistent_rms": 0.2,
        "adam_parameters": ("*embedding.table", "*head.kernel", "*positions"),
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    },
    ADAFACTOR: {
        "decay_rate": 0.8,
        "clipping_threshold": 1.0,
        "multiply_by_parameter_scale": True,
        "min_dim_size_to_factor": 128,
        "eps": 1e-30,
        "weight_decay": 0.0,
    },
}
OPTIMIZERS = {name: {**arguments, "feedback": False} for name, arguments in OPTIMIZERS.items()}
"""Arguments that each optimizer takes, with their defaults."""
AVERAGE_DECAY = "average_decay"
_SPIKES = ("spike_deviations", "spike_window")
_OF_ALL = (AVERAGE_DECAY, *_SPIKES)
"""Arguments that all optimizers take; without a default, so that runs that lack them stay as they are."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    CONSTANT: {},
    COSINE: {"final_learning_rate": 0.0, "decay_steps": None},
    LINEAR: {"final_learning_rate": 0.0, "decay_steps": None},
    STABLE: {"final_learning_rate": 0.0, "decay_steps": None},
}
"""Fields that each schedule takes, with their defaults."""

_NORM = FieldRule("a positive number, or null for no clipping", POSITIVE.holds)
_DECAY = FieldRule("at least 0 and less than 1", lambda value: 0 <= value < 1)
_THRESHOLD = FieldRule("at least 1, or 0 for no clipping", lambda value: value == 0 or 1 <= value < math.inf)
_RULES = {
    **dict.fromkeys(("eps", "decay_rate", "spike_deviations"), POSITIVE),
    "spike_window": FieldRule("at least 2", lambda value: value >= 2),
    **dict.fromkeys(("weight_decay", "consistent_rms"), NOT_NEGATIVE),
    **dict.fromkeys(("b1", "b2", "momentum"), _DECAY),
    **dict.fromkeys(("newton_schulz_steps", "min_dim_size_to_factor"), AT_LEAST_1),
    "clipping_threshold": _THRESHOLD,
    AVERAGE_DECAY: FieldRule("a number between 0 and 1, or leave it out", lambda value: 0 < value < 1),
}
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("nesterov", "multiply_by_parameter_scale", "feedback"), bool),
    **dict.fromkeys(("newton_schulz_steps", "min_dim_size_to_factor", "spike_window"), int),
    "adam_parameters": tuple,
}
"""Types of the arguments that are no real numbers."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are updated otherwise than the rest."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    match: tuple[str, ...]
    """Paths of parameters, such as ``layers.3.mlp.up.kernel``: whole, or their beginning up to a dot, or globs, in
    which ``*`` matches dots too."""
    learning_rate_scale: float = 1.0
    """Factor of the learning rate."""
    weight_decay: float | None = None
    """Weight decay of the group's matrices; None: the optimizer's."""

    def __post_init__(self) -> None:
        check_fields(self, NOT_NEGATIVE, "learning_rate_scale", "weight_decay")
        if not self.match:
            raise ValueError("a group of parameters matches nothing: give its match some paths or globs")
        if self.learning_rate_scale == 1 and self.weight_decay is None:
            raise ValueError(
                f"the group {', '.join(self.match)} changes nothing: give it a learning_rate_scale or a weight_decay"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rates, and the parameters that it changes.

    Raises ValueError, with the remedy, for an argument that the optimizer does not take.
    """

    learning_rate: float
    """The peak learning rate."""
    name: str = ADAMW
    """The optimizer: ``adamw``, ``lion``, ``sgd``, ``adafactor``, or ``muon``, which is for matrices and has Adam for
    the rest."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The coefficients of the optimizer by name, such as ``{b2: 0.99, weight_decay: 0.01}``; the others keep its
    defaults. ``rrfp train --print-config`` prints all of them. ``weight_decay`` is decoupled, times the learning rate,
    and spares vectors (norm scales). ``consistent_rms`` of Muon is the root mean square of the entries of an update, 0
    for the spectral norm ``sqrt(max(1, columns / rows))``; its ``adam_parameters`` are paths or globs of the matrices
    that it leaves to Adam. ``nesterov`` looks ahead along the momentum, which makes AdamW NAdam. ``feedback`` applies
    twice an update less the one before; either makes up for a part of what ``pipeline.delay`` costs. Any takes
    ``average_decay``, such as 0.999: evaluations, exports and samples use the exponential moving average of the
    parameters; and ``spike_deviations``, such as 6: a step is left out whose gradient norm is more than so many
    standard deviations above the mean of the last ``spike_window`` ones (128)."""
    schedule: str = COSINE
    """How the rate goes on after the warm-up: ``constant``, down by a ``cosine`` or ``linear``, or
    ``warmup-stable-decay``, at its peak until it goes down to the end."""
    warmup_steps: int = 0
    """The number of steps before the one with the peak; the rate rises evenly, from ``learning_rate / (warmup_steps +
    1)`` on."""
    decay_steps: int | None = None
    """The number of steps that the decay takes: the first ones after the warm-up, with ``warmup-stable-decay`` the last
    ones of the run. None: all after the warm-up, with ``warmup-stable-decay`` a tenth of the run."""
    final_learning_rate: float | None = None
    """The learning rate at the end of the decay, which is the last step unless ``decay_steps`` says otherwise, and from
    there on. None: 0."""
    clip_norm: float | None = 1.0
    """The largest global norm of the gradient. None: no clipping."""
    freeze: tuple[str, ...] = ()
    """The layers that never change: names, the part of names before a dot (``vision``), or globs."""
    shard: bool = False
    """Whether the replicas share the optimizer state (ZeRO-1); needs ``pipeline.replicas`` of at least 2."""
    on_host: bool = False
    """Whether the optimizer state lies in host memory, from where each update brings it to the devices, layer by
    layer."""
    groups: tuple[ParameterGroup, ...] = ()
    """The parameters with another learning rate or weight decay; of several groups that match, the first one counts."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"name is {self.name!r}: give one of {', '.join(OPTIMIZERS)}")
        known = OPTIMIZERS[self.name]
        if (odd := next((key for key in self.arguments if key not in (*known, *_OF_ALL)), None)) is not None:
            taken = ", ".join((*known, *_OF_ALL))
            raise ValueError(f"arguments has {odd!r}, which {self.name} does not take: it takes {taken}")
        given = {key: value for key, value in self.arguments.items() if value is not None}
        object.__setattr__(self, "arguments", {key: _checked(key, value) for key, value in {**known, **given}.items()})
        fill_fields(self, "schedule", "schedule", SCHEDULES)
        check_fields(self, POSITIVE, "learning_rate")
        check_fields(self, _NORM, "clip_norm")
        check_fields(self, NOT_NEGATIVE, "final_learning_rate", "warmup_steps")
        check_fields(self, AT_LEAST_1, "decay_steps")
        momentum = "b1" if self.name == ADAMW else "momentum"
        if self.arguments.get("nesterov") and not self.arguments[momentum]:
            raise ValueError(f"nesterov looks ahead along the momentum, which is 0: give {momentum}, or nesterov false")
        if [*self.spike_rule] == ["spike_window"]:
            raise ValueError("spike_window is the number of norms that tell a spike: give spike_deviations, such as 6")

    @property
    def spike_rule(self) -> dict[str, Any]:
        """The fields of the pipeline's rules that tell spikes of the gradient norm."""
        return {key: self.arguments[key] for key in _SPIKES if key in self.arguments}

    def num_moments(self, *, is_matrix: bool = True, param_bytes: int = 4) -> int:
        """Returns how many numbers of ``param_bytes`` the state has for every parameter of a matrix or another array;
        few more are neglected."""
        averages = 4 // param_bytes if AVERAGE_DECAY in self.arguments else 0
        more = averages + int(self.arguments["feedback"])
        if self.name == MUON:
            return more + (1 if is_matrix else 2)
        is_kept = bool(self.arguments.get("momentum"))
        return more + {ADAMW: 2, LION: 1, SGD: int(is_kept), ADAFACTOR: 0 if is_matrix else 1}[self.name]


def _checked(name: str, value: Any) -> Any:
    """Returns an argument of an optimizer as its type has it; raises ValueError, with the remedy, if it cannot be."""
    kind = _KINDS.get(name, float)
    if kind is tuple:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"{name} is {shown(value)}: give a list of texts")
        return tuple(listed)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        is_fit, words = isinstance(value, bool), "true or false"
    elif kind is int:
        is_fit, words = is_number and value == int(value), "a whole number"
    else:
        is_fit, words = is_number, "a number"
    if not is_fit:
        raise ValueError(f"{name} is {shown(value)}: give {words}")
    if (rule := _RULES.get(name)) is not None and not rule.holds(value):
        raise ValueError(f"{name} is {shown(value)}: give {rule.words}")
    return kind(value)
