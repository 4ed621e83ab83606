"""A composition: one random way to use the library, as a small record of plain values.

A composition follows from a seed and a number alone. It prints as the fields that differ from their defaults, and every
default is the simplest value of its field, so that a composition shrinks by returning one field after another to its
default. Consecutive numbers share their *setup* (the model, the devices, the optimizer): programs that are compiled for
one of them serve the others, which differ in order, data and the events between steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

GROUP = 12
"""Number of consecutive compositions that share a setup."""
RAW, LANGUAGE, EXPERTS, VISION = "raw", "language", "experts", "vision"
LINEAR, LOOPED, V, WAVE, GRAPH = "linear", "looped", "v", "wave", "graph"
TWO_WAYS = BIDIRECTIONAL, TWO_VS = "bidirectional", "two_vs"
STRICT, READY = "strict", "ready"

OF_ANY_GRAPH = ("gpipe", "1f1b", "1f1b-split", "zb-h1", "zb-h2")
SCHEDULES: dict[str, tuple[str, ...]] = {
    LINEAR: (*OF_ANY_GRAPH, "eager-1f1b", "zb-auto"),
    LOOPED: ("breadth-first", "interleaved-1f1b", "interleaved-1f1b-split", "gis", *OF_ANY_GRAPH),
    V: ("zb-v", "v-half", "v-min", "dualpipe-v", "hanayo", *OF_ANY_GRAPH),
    WAVE: ("hanayo", *OF_ANY_GRAPH),
    BIDIRECTIONAL: ("chimera", "asymmetric-chimera", "greedy-chimera"),
    TWO_VS: ("bitpipe",),
    GRAPH: OF_ANY_GRAPH,
}
"""The schedules whose tables fit a placement, by placement."""
_SPLIT = {"1f1b-split", "zb-h1", "zb-h2", "zb-auto", "interleaved-1f1b-split", "gis", "zb-v", "v-half", "v-min"}
_SPLIT |= {"dualpipe-v"}
"""Schedules whose backward is two tasks."""
HINTS = ("bf", "bfw", "bf-deep", "fb", "b-priority", "f-priority")
CARRIES = ("array", "tuple", "dict", "bf16", "f16", "int", "scalar", "shared", "empty", "key")
LAYERS = ("dense", "conv", "attention", "norm", "scan", "bare", "complex")
GRAPHS = ("skip", "constant", "towers", "optional")
OPTIMIZERS = ("sgd", "momentum", "adamw", "rmsprop", "schedule", "masked", "accumulate", "muon", "by-leaves", "noise")


@dataclass(frozen=True, kw_only=True)
class Composition:
    """One way to use the library. The fields down to ``data_seed`` are the setup."""

    model: str = RAW
    layers: str = "dense"
    """The kind of a raw model's layers."""
    carry: str = "array"
    """The tree that travels between the layers of a raw model."""
    params: str = "f32"
    """The dtypes of a raw model's parameters, ``f32``, ``bf16`` or ``mixed``; for library models those of the
    computation."""
    own_keys: bool = True
    """Whether initial values depend on the layer's own number; otherwise only on the key that ``init`` gets."""
    dropout: bool = False
    named_sums: bool = False
    tied: bool = False
    frozen: str = ""
    """The frozen layers: ``first``, ``middle``, ``last``, ``most`` or ``decoder``."""
    packed: bool = False
    ragged: bool = False
    """Whether microbatches differ in length."""
    depth: int = 4
    """Number of layers, if there are not more chunks."""
    stages: int = 1
    placement: str = LINEAR
    graph: str = "skip"
    data: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    cuts_params: bool = False
    optimizer: str = "sgd"
    clip: float | None = None
    skip_nonfinite: bool = True
    deterministic: bool = False
    shard_optimizer: bool = False
    remat: str = "none"
    seed: int = 0
    """Seed of the pipeline's random keys."""
    data_seed: int = 0
    """Seed of batches and initial parameters. Here the setup ends."""
    microbatches: int = 1
    """Number of microbatches of each replica."""
    steps: int = 3
    schedule: str = ""
    consume: str = READY
    hint: str = ""
    window: int | str | tuple[int, ...] | None = None
    backward: str = ""
    foresight: bool = True
    footprint: bool = True
    read_ahead: int = 0
    dispatch: int | str = "auto"
    operation: str = ""
    """The operation, if any: ``recompute`` or ``offload``."""
    weights: str = "random"
    """The weights: ``random``, ``zero`` (of some microbatches), ``none`` (of a whole step) or ``negative`` (of a whole
    step)."""
    absent: bool = False
    """Whether some microbatches lack an encoder."""
    nonfinite: bool = False
    """Whether the second step's data are not finite."""
    evaluates: bool = False
    restore: str = ""
    """The change after the second step: ``states`` go on in another pipeline, or are ``saved`` and restored where the
    model lies in another way."""

    def __str__(self) -> str:
        told = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Composition({', '.join(told)})"

    @property
    def setup(self) -> "Composition":
        """The composition with only its setup left, which decides the programs that have to be compiled."""
        return replace(self, **{name: default for name, default in _DEFAULTS.items() if name not in SETUP})

    @property
    def is_split(self) -> bool:
        """Whether backwards are two tasks."""
        follows = self.schedule and not self.hint
        return self.schedule in _SPLIT if follows else self.backward == "split" or self.hint == "bfw"

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the model, without the copies of pipelines in two directions."""
        if self.placement == GRAPH:
            return 3 if self.model == VISION else 4
        return self.stages * {LOOPED: 2, V: 2, TWO_VS: 2, WAVE: 4}.get(self.placement, 1)


_DEFAULTS = {f.name: f.default for f in fields(Composition)}
SETUP = frozenset(list(_DEFAULTS)[: list(_DEFAULTS).index("data_seed") + 1])


def simpler(composition: Composition) -> Iterator[Composition]:
    """Yields the compositions that differ in one field, which has its default or, if that is far, a value between."""
    for name, default in _DEFAULTS.items():
        value = getattr(composition, name)
        if value == default:
            continue
        yield replace(composition, **{name: default})
        if type(value) is type(default) is int:
            for between in range(default + 1, min(value, default + 4)):
                yield replace(composition, **{name: between})
        if name == "mesh" and len(value) > 1:
            yield from (replace(composition, mesh=(axis,)) for axis in value)


def drawn(seed: int, number: int) -> Composition:
    """Returns composition ``number`` of a seed."""
    shared = Random(f"{seed} setup {number // GROUP}")
    setup = _draw_setup(shared)
    # A backward in one task and a backward in two are different programs: a setup has mostly one of them.
    is_split = shared.random() < 0.4
    random = Random(f"{seed} order {number}")
    return _draw_order(random, setup, is_split=is_split if random.random() < 0.9 else not is_split)


def _pick(random: Random, /, **weights: float) -> Any:
    return random.choices(list(weights), list(weights.values()))[0]


def _draw_setup(random: Random) -> Composition:
    chance = lambda share: random.random() < share  # noqa: E731
    model = _pick(random, raw=6, language=2, experts=1, vision=1)
    raw = model == RAW
    placements = {LINEAR: 4, LOOPED: 2, V: 2, WAVE: 1, BIDIRECTIONAL: 0.5, TWO_VS: 0.5, GRAPH: 2}
    placement = GRAPH if model == VISION else _pick(random, **placements)
    if placement == GRAPH and not raw and model != VISION:
        placement = LINEAR
    most = {LOOPED: 2, V: 2, WAVE: 1 if not raw else 2, GRAPH: 3 if model == VISION else 4}.get(placement, 4)
    stages = random.choice((2, 4)) if placement in TWO_WAYS else random.randint(1, most)
    stages = 2 if placement == TWO_VS else stages
    data = _pick(random, one=3, two=1)
    mesh = _draw_mesh(random, model)
    tied = placement != GRAPH and chance(0.25)
    setup = Composition(
        model=model,
        layers=random.choices(LAYERS, (6, 2, 2, 2, 2, 1, 1))[0] if raw else "dense",
        carry=random.choices(CARRIES, (6, 3, 3, 2, 2, 2, 2, 2, 2, 0.3))[0] if raw else "array",
        params=_pick(random, f32=8, bf16=1, mixed=1),
        own_keys=not (raw and chance(0.1)),
        dropout=raw and chance(0.25),
        named_sums=raw and chance(0.25),
        tied=tied,
        frozen=_pick(random, first=1, middle=1, last=1, most=1) if chance(0.25) else "",
        packed=model in (LANGUAGE, EXPERTS) and chance(0.25),
        ragged=(raw and chance(0.2)) or model == VISION,
        depth=random.choice((4, 5)) if raw else 2,
        stages=stages,
        placement=placement,
        graph=random.choice(GRAPHS) if raw and placement == GRAPH else "skip",
        data=2 if data == "two" else 1,
        mesh=mesh,
        cuts_params=raw and bool(mesh) and chance(0.5),
        optimizer=random.choices(OPTIMIZERS, (4, 4, 5, 2, 2, 2, 1, 1, 0.5, 0.3))[0],
        clip=random.choice((0.05, 1.0)) if chance(0.5) else None,
        skip_nonfinite=chance(0.85),
        deterministic=chance(0.25),
        shard_optimizer=data == "two" and chance(0.4),
        remat=_pick(random, none=6, dots=2, full=2),
        seed=random.choice((0, 5, 2**32 - 1)),
        data_seed=random.randrange(100),
    )
    if model == VISION and setup.frozen in ("last", "most"):
        setup = replace(setup, frozen="decoder")
    return replace(setup, depth=max(setup.depth, setup.num_chunks))


def _draw_mesh(random: Random, model: str) -> tuple[tuple[str, int], ...]:
    if random.random() < 0.65:
        return ()
    names = ["tensor", "fsdp", "context"] + ["expert"] * (model == EXPERTS)
    axes = random.sample(names, random.choice((1, 1, 2)))
    return tuple((axis, 2) for axis in axes)


def _draw_order(random: Random, setup: Composition, *, is_split: bool) -> Composition:
    chance = lambda share: random.random() < share  # noqa: E731
    stages, placement = setup.stages, setup.placement
    schedules = [name for name in SCHEDULES[placement] if placement in TWO_WAYS or (name in _SPLIT) == is_split]
    schedule = random.choice(schedules) if placement in TWO_WAYS or chance(0.6) else ""
    consume = STRICT if schedule and chance(0.4) else READY
    hint = random.choice(HINTS) if consume == READY and chance(0.2 if schedule else 0.7) else ""
    hint = "bf" if hint == "bfw" and not is_split else hint
    follows = bool(schedule) and not hint
    microbatches = _draw_microbatches(random, schedule, stages)
    guided = follows and consume == READY
    operation = _draw_operation(random, setup, schedule) if chance(0.15) and (follows or not schedule) else ""
    return replace(
        setup,
        microbatches=microbatches,
        steps=random.choice((3, 4)),
        schedule=schedule,
        consume=consume,
        hint=hint,
        window=_draw_window(random, setup, microbatches, follows=follows) if chance(0.4) else None,
        backward="" if follows or hint == "bfw" else "split" if is_split else random.choice(("", "fused")),
        foresight=not guided or chance(0.8),
        footprint=not guided or bool(operation) or chance(0.8),
        read_ahead=random.randint(1, 3) if consume == READY and chance(0.1) else 0,
        dispatch=random.choice(("auto", 0, "certain", "just-in-time")),
        operation=operation,
        weights=_pick(random, random=8, zero=2, none=0.7, negative=0.3),
        absent=setup.graph in ("towers", "optional") and chance(0.6),
        nonfinite=chance(0.15),
        evaluates=chance(0.25),
        restore=_pick(random, states=2, saved=1) if chance(0.24) else "",
    )


def _draw_microbatches(random: Random, schedule: str, stages: int) -> int:
    """Returns a number of microbatches that the schedule accepts, often less than the number of stages."""
    if schedule in ("interleaved-1f1b", "interleaved-1f1b-split", "gis", "bitpipe"):
        return stages * random.randint(1, 2)
    if schedule == "dualpipe-v":
        return 2 * stages
    if "chimera" in schedule:
        return 2 * random.randint(1, 2)
    return random.choice((1, 2, 3, 4, 6))


def _draw_window(random: Random, setup: Composition, microbatches: int, *, follows: bool) -> Any:
    if random.random() < 0.25:
        return random.choice(("1MiB", "64MiB"))
    if follows:  # a table needs as much as it holds itself
        return 2 * microbatches
    if random.random() < 0.3:
        return tuple(random.randint(1, 4) for _ in range(setup.stages))
    return random.randint(1, 4)


def _draw_operation(random: Random, setup: Composition, schedule: str) -> str:
    names = ["offload"] * bool(schedule)
    return random.choice(names + ["recompute"] * (setup.remat != "full") or [""])
