"""The part of a model that this process hosts: its devices, its programs and its state.

Chunks go by two numbers. The *base* number is the model's own, from 0 to C-1; programs, shapes and layers know no
other. In the pipeline of all replicas (:mod:`rrfp_jax.core.replicas`), which arbiters and messages know, chunk
``c`` of replica ``r`` is ``r * C + c``.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any, TypeVar

import jax
import optax
from jax.sharding import Mesh, Sharding
from jax.stages import Compiled

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.core.plan import share_holders
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.agreement import NormHistory
from rrfp_jax.programs.batches import Buckets, absent_chunks
from rrfp_jax.programs.chunk import Chunk, Params, as_evaluated, parts_of, trained_specs
from rrfp_jax.programs.chunk_plan import check_reached, plan_chunk
from rrfp_jax.programs.compiled import (
    ChunkSizes,
    CompiledChunk,
    PairOfPrograms,
    PairPrograms,
    Variant,
    compile_pairs,
    pairs_of,
)
from rrfp_jax.programs.compiling import CompileProgress, ProgramCount, require_jit, shared_program, times_kernels
from rrfp_jax.programs.pieces import PieceLayout, tied_names
from rrfp_jax.programs.remat import Remat
from rrfp_jax.programs.sameness import ProgramStore
from rrfp_jax.programs.shapes import (
    ChunkShapes,
    accumulator_spec,
    derive_shapes,
    describe_chunk,
    gradient_spec,
    part_of,
    pick,
    spec_of,
)
from rrfp_jax.programs.shardings import (
    all_passing,
    axes_of,
    mesh_of,
    param_partition,
    place,
    shardings_of,
    spread,
    unit_shardings,
)
from rrfp_jax.programs.stage_devices import StageDevices, connect
from rrfp_jax.programs.state import (
    ChunkState,
    Shares,
    StatePart,
    fitting_states,
    initial_optimizer_state,
    initial_shared_state,
    initial_state,
    optimizer_specs,
    overlaid,
    share_of,
    state_parts,
    state_specs,
)
from rrfp_jax.programs.target import Target, settings_here, tracing_for
from rrfp_jax.programs.update_functions import AveragedState, moved_state
from rrfp_jax.programs.updates import StageUpdates
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.transports import ArrayEdge, EdgeOf
from rrfp_jax.schedules import PipelineGraph, Placement

_Made = TypeVar("_Made")
Plans = Mapping[int, Sequence[Variant]]
"""By base number, the variants of a hosted chunk that were traced."""


@dataclass
class HostedState:
    """The state that the hosted chunks carry from step to step."""

    chunks: dict[int, ChunkState]
    """States of chunks, by number in the pipeline of all replicas."""
    shared: dict[int, Any]
    """By base number, the optimizer states that the replicas of a stage share; empty unless they do."""
    norms: NormHistory = field(default_factory=NormHistory)
    """The norms of the last steps' gradients, where they tell spikes."""


@dataclass(frozen=True)
class HostedPrograms:
    """The compiled programs of the hosted chunks."""

    shapes: tuple[tuple[ChunkShapes, ...], ...]
    """Shapes of every bucket and chunk of the model; buckets of evaluations come last."""
    chunks: dict[int, CompiledChunk] = field(default_factory=dict)
    """Programs of chunks, by number in the pipeline of all replicas."""
    replicas: dict[int, StageUpdates] = field(default_factory=dict)
    """By base number, the programs that the replicas of a stage run together; empty without data parallelism."""
    pairs: PairPrograms = field(default_factory=dict)
    """Programs that do the work of two programs of a unit, by these two; empty unless they were asked for."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds that each program took to compile, by the ``id`` of the compiled program."""

    @property
    def sizes_of_evaluation(self) -> dict[int, ChunkSizes]:
        """Sizes of every hosted chunk in evaluations; as in training where it has no part in them."""
        return {chunk: each.sizes_of_evaluation or each.sizes for chunk, each in self.chunks.items()}


class HostedModel:
    """Knows where the model's chunks lie, and makes state and programs of those that lie here."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        placement: Placement,
        process: Process,
        *,
        optimizer: optax.GradientTransformation,
        updates: UpdateRules,
        seed: int,
        remat: Sequence[Remat],
        holding: Sequence[Chunk] | None = None,
    ) -> None:
        require_jit()
        self.chunks, self.holding = tuple(chunks), tuple(chunks if holding is None else holding)
        """The chunks as they compute, and as they hold parameters."""
        self.placement, self.process = placement, process
        self.optimizer, self.updates = optimizer, updates
        self._seed, self._remat = seed, tuple(remat)
        self._by_messages = updates.by_messages(process.layout.data)
        self._shards_together = updates.shards_together(process.layout.data)
        self.num_shares = updates.num_shares(process.layout.data)
        """How many shares an optimizer state has of which each replica holds two; 1: it is not cut in this way."""
        self._compiled: dict[Hashable, HostedPrograms] = {}
        self._store = ProgramStore()
        self._target = Target.of(process.own_device(process.units[0]))
        layout = process.layout
        self.grids = [
            StageDevices(
                [process.devices_of(unit) for unit in layout.units_of_stage(stage)],
                axes,
                local=process.replicas_here(stage),
            )
            for stage, axes in enumerate(layout.axes_of_stage)
        ]
        """The devices of every stage, also those of other processes."""
        self.copies = Replication(num_chunks=len(self.chunks), num_microbatches=1, num_replicas=layout.data)
        hosted, stage_of = set(process.units), placement.stage_of_chunk
        self.base_chunks = tuple(c for c in range(len(self.chunks)) if hosted & set(layout.units_of_stage(stage_of[c])))
        """Base numbers of the hosted chunks, ascending."""
        if layout.absent and (not self._by_messages or updates.shard_optimizer):
            raise ValueError(
                f"the stages have {','.join(map(str, layout.replicas))} replicas, which add up gradients by messages "
                "alone and share no optimizer state: give reduce messages, and no shard_optimizer"
            )
        if self._by_messages:
            self._check_messages()
        elif process.cluster is not None and not process.cluster.together and process.layout.needs_collectives():
            raise ValueError(
                f"the replicas of a stage lie in several processes ({process.layout.describe()}) that have not started "
                "JAX together: join the cluster with together=True, or take reduce messages"
            )

    def _check_messages(self) -> None:
        """Raises ValueError where units cannot add up gradients by messages."""
        layout, stage_of = self.process.layout, self.placement.stage_of_chunk
        spread_out = next((unit for unit in range(layout.num_units) if len(layout.ranks_of(unit)) > 1), None)
        if spread_out is not None:
            raise ValueError(
                f"reduce is messages, and a replica of stage {layout.stage_of(spread_out)} spans "
                f"{len(layout.ranks_of(spread_out))} processes: give each a process of its own, or reduce collective"
            )
        for one, other in combinations(range(len(self.chunks)), 2):
            meshes = [self._grid(base).unit_mesh(0).shape for base in (one, other)]
            if tied_names(self.holding, one, other) and meshes[0] != meshes[1]:
                raise ValueError(
                    f"reduce is messages, and stages {stage_of[one]} and {stage_of[other]}, which share layers, have "
                    "different meshes: give them the same, or reduce collective"
                )

    def _shares(self, replica: int) -> Shares | None:
        """Returns the shares that a replica holds while nobody is lost; None where the optimizer state is not cut."""
        data = range(self.num_shares)
        held = frozenset(share for share in data if replica in share_holders(share, data, len(data)))
        return Shares(self.num_shares, held) if self.num_shares > 1 else None

    def _grid(self, base: int) -> StageDevices:
        return self.grids[self.placement.stage_of_chunk[base]]

    def numbers(self, base: int) -> dict[int, int]:
        """Returns, for every hosted replica of a chunk, its number in the pipeline of all replicas."""
        return {replica: self.copies.chunk(base, replica) for replica in self._grid(base).local_replicas}

    def _boundary(self, chunk: int) -> Sharding:
        return self._grid(self.copies.base(chunk)).unit_sharding(self.copies.replica(chunk))

    # -- state -------------------------------------------------------------------------------------------------------

    def initial_state(self, graph: PipelineGraph, key: jax.Array | None) -> HostedState:
        """Returns the state to start from, for the graph of one replica; without a key as specs with shardings, and
        nothing is computed."""
        require_jit()
        state = HostedState({}, {})
        for base in filter(lambda base: graph.holder(base) == base, self.base_chunks):
            devices, model, units = self._grid(base), (self.holding, base, self.optimizer), self.numbers(base)
            trains = graph.updates(base)
            is_shared = self._shards_together and trains
            for replica, number in units.items():
                of_unit: dict[str, Any] = {
                    "sharding": devices.unit_sharding(replica),
                    "trains": trains,
                    "shard_optimizer": is_shared,
                    "shares": self._shares(replica),
                }
                state.chunks[number] = (
                    state_specs(*model, **of_unit)
                    if key is None
                    else initial_state(*model, **of_unit, key=key, store=self._store)
                )
            if is_shared and jax.tree.leaves(trained_specs(self.holding[base])):
                params = {replica: state.chunks[number].params for replica, number in units.items()}
                state.shared[base] = (
                    optimizer_specs(*model, devices)
                    if key is None
                    else initial_shared_state(*model, devices, params, store=self._store)
                )
        return state

    def by_chunk(self, held: HostedState, *, once: bool = False) -> list[tuple[int, ChunkState]]:
        """Returns every hosted chunk's base number and state; state that replicas share stands in each of theirs.

        With ``once`` each share of a state, of which two replicas hold one, is with the first of them that lives.
        """
        states = []
        for number, state in held.chunks.items():
            base, own = self.copies.base(number), state.optimizer_state
            if once and self.num_shares > 1 and own:
                parts, living = self.parts(base), self.living_replicas(base)
                led = {k for k in range(self.num_shares) if self._leads(k, self.copies.replica(number), living)}
                own = tuple(each if part.share in led else None for part, each in zip(parts, own, strict=True))
            states.append((base, replace(state, optimizer_state=held.shared.get(base, own))))
        return states

    def parts(self, base: int) -> tuple[StatePart, ...]:
        """Returns the parts of a chunk's parameters, one for each entry of its optimizer state."""
        return state_parts(self.holding[base], trained_specs(self.holding[base]), self.optimizer, self.num_shares)

    def living_replicas(self, base: int) -> list[int]:
        """Returns the replicas of a chunk's stage that have lost no rank."""
        layout, living = self.process.layout, {*self.process.living}
        units = layout.units_of_stage(self.placement.stage_of_chunk[base])
        present = [(replica, unit) for replica, unit in enumerate(units) if unit not in layout.absent]
        return [replica for replica, unit in present if {*layout.ranks_of(unit)} <= living]

    def _leads(self, share: int, replica: int, living: Sequence[int]) -> bool:
        return replica == share_holders(share, living, self.num_shares)[0]

    def from_chunks(self, states: Sequence[ChunkState], graph: PipelineGraph) -> HostedState:
        """Returns the hosted state made of these states alone, in the order of :meth:`by_chunk`.

        Optimizer state that is a spec starts anew, from the parameters. All processes call it alike. Raises ValueError
        for states that do not fit the specs of :meth:`initial_state`.
        """
        specs, state = self.initial_state(graph, None), HostedState({}, {})
        expected = [(describe_chunk(self.chunks, base), spec) for base, spec in self.by_chunk(specs)]
        for number, held in zip(specs.chunks, fitting_states(expected, states), strict=True):
            base = self.copies.base(number)
            is_shared = base in specs.shared
            if is_shared:
                state.shared.setdefault(base, held.optimizer_state)
            # An operation may have cut the parameters when the states were asked for.
            params = jax.tree.map(_lying_as, held.params, specs.chunks[number].params)
            optimizer_state = () if is_shared else held.optimizer_state
            state.chunks[number] = replace(held, params=params, optimizer_state=optimizer_state)
        for base in filter(lambda base: graph.holder(base) == base, self.base_chunks):
            devices, model = self._grid(base), (self.holding, base, self.optimizer)
            units = {replica: state.chunks[number] for replica, number in self.numbers(base).items()}
            if base in state.shared:
                params_of_units = {replica: unit.params for replica, unit in units.items()}
                fresh = partial(initial_shared_state, *model, devices, params_of_units, store=self._store)
                state.shared[base] = _filled_in(state.shared[base], fresh)
            for replica, unit in units.items():
                sharding = devices.unit_sharding(replica)
                options: dict[str, Any] = {"shares": self._shares(replica), "store": self._store}
                fresh = partial(initial_optimizer_state, *model, sharding, unit.params, **options)
                unit.optimizer_state = _filled_in(unit.optimizer_state, fresh)
        return state

    @cached_property
    def keeps_averages(self) -> bool:
        """Whether the optimizer keeps averages of the parameters."""
        trained = next(filter(jax.tree.leaves, map(trained_specs, self.holding)), {})
        return isinstance(jax.eval_shape(self.optimizer.init, spec_of(trained)), AveragedState)

    def averages(self, held: HostedState) -> dict[int, Params]:
        """Returns the parameters of hosted chunks with averages in the place of those that train, by number.

        Averages that lie where the parameters do, in the same dtype, are not copied. All processes of a stage call it
        alike.
        """
        found: dict[int, Params] = {}
        # In one order everywhere, since replicas that share the averages make copies of them together.
        for base in sorted({self.copies.base(number) for number in held.chunks}):
            devices, trained = self._grid(base), trained_specs(self.holding[base])
            units, specs = self.numbers(base), spec_of(trained)
            if base in held.shared:
                partition = pick(param_partition(self.holding, base, axes_of(devices.mesh)), trained)
                whole = self._as_params(held.shared[base], spread(specs, place(partition, devices.sharding())))
                averages = devices.per_replica(whole)
            else:
                averages = {
                    replica: self._as_params(held.chunks[n].optimizer_state, pick(held.chunks[n].params, trained))
                    for replica, n in units.items()
                }
            found |= {n: held.chunks[n].params | averages[replica] for replica, n in units.items()}
        return found

    def _as_params(self, states: Sequence[AveragedState], like: Any) -> Params:
        """Returns the averages in some optimizer states in the dtypes and places of arrays or specs, or nothing."""
        if not states:
            return {}
        averages = parts_of(overlaid({}, [state.parameter_average for state in states]), like)
        given, wanted, structure = jax.tree.leaves(averages), jax.tree.leaves(like), jax.tree.structure(like)
        if all(a.dtype == w.dtype and _lies_as(a, w) for a, w in zip(given, wanted, strict=True)):
            return jax.tree.unflatten(structure, given)
        to_devices = partial(moved_state, self.optimizer, space=jax.memory.Space.Device)
        program = shared_program(
            self._store,
            "average",
            lambda given: [leaf.astype(spec.dtype) for leaf, spec in zip(to_devices(given), wanted, strict=True)],
            spec_of(given),
            in_shardings=(shardings_of(given),),
            out_shardings=shardings_of(wanted),
        )
        return jax.tree.unflatten(structure, program(given))

    # -- programs ----------------------------------------------------------------------------------------------------

    def compile(
        self,
        graph: PipelineGraph,
        buckets: Buckets,
        progress: CompileProgress = lambda done, total: None,
        *,
        max_programs: int | None = None,
        evaluation: Buckets | None = None,
        pairs: Collection[tuple[str, str]] = (),
        check_plans: Callable[[Plans], None] = lambda planned: None,
    ) -> HostedPrograms:
        """Compiles everything for microbatches of these shapes, once.

        Args:
            graph: the graph of one replica.
            progress: called with the number of programs that are compiled, and of all; from any thread, one call at a
                time.
            max_programs: the most different programs that may be compiled; None: any number.
            evaluation: the shapes of microbatches that are run forward alone; they are numbered after the others.
            pairs: the names of programs that run in pairs, of :data:`PAIRED_PROGRAMS`; units of several devices get
                programs that do the work of both.
            check_plans: called with all that is traced before anything is compiled.

        Raises ValueError where chunks, graph and buckets do not fit, or above ``max_programs``.
        """
        key = (graph, buckets.key, evaluation and evaluation.key, frozenset(pairs))
        if key in self._compiled:
            return self._compiled[key]
        require_jit()
        # Counted before anything is traced, which takes long for many buckets.
        least = max(_least_programs(self.chunks[base], buckets) for base in self.base_chunks)
        _check_number(least, max_programs, len(buckets), at_least=True)
        settings = settings_here()
        with tracing_for(self._target):
            shapes = _shapes(self.chunks, graph, buckets)
            quiet, forward_graph = tuple(map(as_evaluated, self.chunks)), graph.evaluating()
            evaluated = () if evaluation is None else _shapes(quiet, forward_graph, evaluation)
        programs = HostedPrograms((*shapes, *evaluated))

        def plan_one(base: int) -> tuple[list[Variant], list[int | None]]:
            with settings(), tracing_for(self._target):
                variants, of_bucket = self._variants(base, self.chunks, graph, shapes)
                if not variants:
                    raise ValueError(
                        f"{describe_chunk(self.chunks, base)} runs in none of the {len(shapes)} buckets: prepare the "
                        "pipeline for one whose microbatches have all leaves"
                    )
                if graph.trains(base):
                    check_reached(self.chunks, base, [variant.plan for variant in variants])
                more, of_more = self._variants(base, quiet, forward_graph, evaluated, evaluates=True)
                shifted = [None if number is None else len(variants) + number for number in of_more]
                return [*variants, *more], [*of_bucket, *shifted]

        def compile_one(base: int) -> tuple[int, StageUpdates | None, dict[int, CompiledChunk]]:
            with compiling():
                together = self._compile_updates(base, graph)
                compiled = {
                    number: CompiledChunk(
                        base,
                        self.chunks,
                        graph,
                        *planned[base],
                        holding=self.holding,
                        passes={c: planned[c] for c in graph.passes_of(base) if c != base},
                        optimizer=self.optimizer,
                        sharding=self._grid(base).unit_sharding(replica),
                        seed=self._seed,
                        stage=together,
                        copies=(replica, self.process.layout.data, self.updates.deterministic)
                        if self._by_messages
                        else None,
                        sparse=self.updates.sparse,
                        shares=self._shares(replica),
                        store=self._store,
                    )
                    for replica, number in self.numbers(base).items()
                }
                for replica, number in self.numbers(base).items():
                    passes = compiled[number].passes.items()
                    compiled |= {self.copies.chunk(c, replica): each for c, each in passes}
            return base, together, compiled

        @contextmanager
        def compiling() -> Iterator[None]:
            with count.counting(), settings(), tracing_for(self._target):
                yield

        # Threads help, since XLA releases the GIL while it compiles.
        with ThreadPoolExecutor(thread_name_prefix="compile") as executor:
            planned = dict(zip(self.base_chunks, executor.map(plan_one, self.base_chunks), strict=True))
        variants = {base: of_chunk for base, (of_chunk, _) in planned.items()}
        different = {variant.plan.kind: variant.plan for of_chunk in variants.values() for variant in of_chunk}
        in_pairs = self._pairs(planned, pairs) if pairs else {}
        number = sum(plan.num_programs for plan in different.values())
        number += _num_kinds(chain.from_iterable(in_pairs.values()), variants)
        _check_number(number, max_programs, len(programs.shapes), at_least=False)
        with tracing_for(self._target):
            check_plans(variants)
        holders = [base for base in self.base_chunks if graph.holder(base) == base]
        numbers = [self._num_programs(base, [variants[c] for c in graph.passes_of(base)], graph) for base in holders]
        num_pairs = sum(len(self._grid(base).local_replicas) * len(found) for base, found in in_pairs.items())
        count = ProgramCount(sum(numbers) + num_pairs, progress)
        for base, together, compiled in self._in_queues(holders, compile_one):
            programs.chunks.update(compiled)
            if together is not None:
                programs.replicas[base] = together
        self._compile_pairs(programs, in_pairs, compiling)
        programs.seconds.update(count.seconds)
        self._compiled[key] = programs
        return programs

    def _pairs(
        self,
        planned: Mapping[int, tuple[Sequence[Variant], Sequence[int | None]]],
        joined: Collection[tuple[str, str]],
    ) -> dict[int, list[PairOfPrograms]]:
        """Returns the pairs of programs to compile for each stage, by its first hosted chunk; none for units of one
        device, which have no collective to hide."""
        found = {}
        for stage, chunks in enumerate(self.placement.chunks_of_stage):
            own = {base: planned[base] for base in chunks if base in planned}
            if own and self.grids[stage].unit_size > 1:
                found[min(own)] = pairs_of(own, joined)
        return found

    def _compile_pairs(
        self,
        programs: HostedPrograms,
        pairs: Mapping[int, Sequence[PairOfPrograms]],
        compiling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Adds programs of two to the compiled programs that they are made of; see :meth:`_pairs`."""

        def of_stage(first: int) -> PairPrograms:
            found: PairPrograms = {}
            with compiling():
                for replica in self._grid(first).local_replicas:
                    numbers = {c: self.copies.chunk(c, replica) for pair in pairs[first] for c, *_ in pair}
                    own = {c: programs.chunks[number] for c, number in numbers.items()}
                    found |= compile_pairs(own, pairs[first], self._store)
            return found

        for found in self._in_queues(pairs, of_stage):
            programs.pairs.update(found)

    def _in_queues(self, bases: Iterable[int], make: Callable[[int], _Made]) -> list[_Made]:
        """Returns the result of ``make`` for each of these hosted chunks, several at a time where that is allowed."""
        queues, num_threads = self._compile_queues([*bases])
        if not queues:
            return []
        with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as executor:
            made = executor.map(lambda queue: [make(base) for base in queue], queues)
            return [each for of_queue in made for each in of_queue]

    def _compile_queues(self, bases: Sequence[int]) -> tuple[list[list[int]], int | None]:
        """Returns these hosted chunks in lists, each compiled in order by one thread, and the number of threads.

        XLA chooses a GPU's kernels by timing them there, which a second compilation for the same GPU would disturb, in
        time and in memory. Where a unit spans several processes they time its kernels together, and wait for each
        other in every program. They cannot wait in a circle: all of them compile the programs that they share in one
        order, and every list has a thread of its own.
        """
        if not self.process.is_here or not times_kernels(self.process.own_device(self.process.units[0])):
            return [[base] for base in bases], None
        queues: list[tuple[set[jax.Device], list[int]]] = []
        for base in bases:
            devices = set(self._grid(base).mesh.devices.flat)
            shared = [queue for queue in queues if queue[0] & devices]
            queues = [queue for queue in queues if queue not in shared]
            queues.append((devices.union(*(own for own, _ in shared)), sum((own for _, own in shared), [base])))
        return [sorted(queue) for _, queue in queues], len(queues)

    def _variants(
        self,
        base: int,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        shapes: Sequence[Sequence[ChunkShapes]],
        *,
        evaluates: bool = False,
    ) -> tuple[list[Variant], list[int | None]]:
        """Returns the variants of a chunk that differ over the buckets, and for each bucket the number of its variant,
        None where the chunk is skipped. Evaluations have forwards that keep nothing."""
        grid = self._grid(base)
        mesh = mesh_of(grid.unit_sharding(grid.local_replicas[0]))
        trained: dict[str, Any] = {}
        if not evaluates:
            trained = {"remat": self._remat[base], "lean_forward": self._has_lean_forward(base, graph)}
        numbers: dict[Hashable, int] = {}
        variants: list[Variant] = []
        of_bucket: list[int | None] = []
        for each in shapes:
            if not each[base].exists:
                of_bucket.append(None)
                continue
            number = numbers.setdefault(each[base].read, len(variants))
            if number == len(variants):
                plan = plan_chunk(base, chunks, graph, each, mesh=mesh, store=self._store, **trained)
                variants.append(Variant(each[base], plan, evaluates=evaluates))
            of_bucket.append(number)
        return variants, of_bucket

    def _has_lean_forward(self, base: int, graph: PipelineGraph) -> bool:
        """Returns whether a chunk gets a forward without stash; in deterministic mode one program alone makes outputs.

        Raises ValueError where operations make the stash of a chunk that keeps no more than its inputs anyway.
        """
        if not graph.ops or not graph.operations.remakes_stash(base):
            return False
        if self._remat[base] == "full":
            raise ValueError(
                f"{describe_chunk(self.chunks, base)} has remat full, so that its backward computes everything again: "
                "leave recompute out there, or take remat none or dots"
            )
        return not self.updates.deterministic

    def _num_programs(self, base: int, variants: Sequence[Sequence[Variant]], graph: PipelineGraph) -> int:
        """Returns the number of programs of a chunk, given the variants of each of its passes."""
        trained, num_units = trained_specs(self.holding[base]), len(self.numbers(base))
        plans = [variant.plan for of_pass in variants for variant in of_pass]
        derives = any(plan.split.num_derived for plan in plans)
        num_programs = num_units * (sum(plan.num_programs for plan in plans) + derives)
        if graph.updates(base) and jax.tree.leaves(trained):
            parts = self.parts(base)
            num_programs += len(parts) * (1 if self._shards_together else num_units)
            if self.num_shares > 1:  # For each part a program clears its sums, and for each share one copies it.
                num_programs += (len(parts) + len({part.share for part in parts})) * num_units
            num_programs += 3 * num_units if self._by_messages else 1
            num_programs += num_units if self.updates.sparse is not None else 0
        return num_programs

    def _compile_updates(self, base: int, graph: PipelineGraph) -> StageUpdates | None:
        """Returns R and U of all replicas together; None where there is one replica, or each runs its own."""
        if self.process.layout.data == 1 or self._by_messages:
            return None
        return StageUpdates(
            base,
            self.holding,
            graph,
            optimizer=self.optimizer,
            devices=self._grid(base),
            ordered=self.updates.deterministic,
            shard_optimizer=self._shards_together,
            store=self._store,
        )

    def connect(self, programs: HostedPrograms) -> None:
        """Brings up the connections behind the collectives of programs; all processes call it at the same point."""
        together: dict[Mesh, list[Compiled]] = {}
        for number, chunk in programs.chunks.items():
            base = self.copies.base(number)
            joint = [] if base not in programs.replicas else list(programs.replicas[base].compiled.values())
            if joint:
                together.setdefault(self._grid(base).mesh, []).extend(joint)
            if (mesh := chunk.shardings.mesh) is not None:
                together.setdefault(mesh, []).extend(each for each in chunk.compiled.values() if each not in joint)
        connect(self.grids, together)

    # -- messages ----------------------------------------------------------------------------------------------------

    def edges(self, programs: HostedPrograms, graph: PipelineGraph) -> EdgeOf:
        """Returns the function that gives the content of a message between chunks for microbatches of a bucket, and its
        shardings at both ends; one and the same for all buckets in which the content has the same shapes.

        The content is None where these microbatches skip one of the chunks; the edge is None for plain data. In place
        of a bucket a message with a share has the share's number. ``graph`` is the graph of one replica.
        """
        shapes, known = programs.shapes, dict[Hashable, ArrayEdge]()

        def edge(message: Message, bucket: int) -> ArrayEdge | None:
            source, target = message.source, message.target
            bases = self.copies.base(source), self.copies.base(target)
            if message.kind is MessageKind.SHARED:
                # Copies in another replica hear only that gradients are complete: a collective sums them.
                if self.copies.replica(source) != self.copies.replica(target):
                    return None
                names = tuple(sorted(self.holding[bases[0]].tied))
                # The sender's partition at both ends: its layers need not be all of the receiver's.
                ends = [
                    pick(unit_shardings(self.holding, bases[0], self._boundary(end)).params, names)
                    for end in (source, target)
                ]
                spec = accumulator_spec(pick(shapes[0][bases[0]].params, names))
                return ArrayEdge(spec=spec, source=ends[0], target=ends[1])
            if message.kind in (MessageKind.PIECE, MessageKind.SUM):
                return self._edge_of_pieces(message, bases)
            if message.kind is MessageKind.SHARE:
                base, parts = bases[0], self.parts(bases[0])
                at = [unit_shardings(self.holding, base, self._boundary(end)).params for end in (source, target)]
                specs = spec_of(trained_specs(self.holding[base]))
                of_share = [share_of(parts, bucket, each) for each in (specs, *at)]
                return ArrayEdge(spec=of_share[0], source=of_share[1], target=of_share[2])
            at_ends = [shapes[bucket][base] for base in bases]
            carried = None
            if all(end.exists for end in at_ends):
                goes_back = message.kind is MessageKind.GRADIENT
                forth = bases[::-1] if goes_back else bases
                carried = part_of(at_ends[goes_back].outputs, graph.part(*forth))
                carried = gradient_spec(carried) if goes_back else carried
            lying = [all_passing(self._boundary(end), carried) for end in (source, target)]
            which = (*message[:3], *jax.tree.leaves(carried), jax.tree.structure(carried))
            return known.setdefault(which, ArrayEdge(spec=carried, source=lying[0], target=lying[1]))

        return edge

    def _edge_of_pieces(self, message: Message, bases: tuple[int, int]) -> ArrayEdge:
        """Returns the edge of a piece, or of its sum; chunks of different base numbers exchange shared layers alone."""
        layout, at_ends = None, []
        for end in (message.source, message.target):
            boundary = self._boundary(end)
            axes, sparse = axes_of(mesh_of(boundary)), self.updates.sparse
            num_parts = None if sparse is None else sparse.num_parts
            layout = PieceLayout(self.holding, bases[0], axes, self.process.layout.data, num_parts=num_parts)
            at_ends.append(layout.at(boundary))
        assert layout is not None
        carried: list[Any] = [layout.spec, *at_ends]
        if bases[0] != bases[1]:
            carried = [pick(each.shared, tied_names(self.holding, *bases)) for each in carried]
        return ArrayEdge(spec=carried[0], source=carried[1], target=carried[2])


def _num_kinds(pairs: Iterable[PairOfPrograms], variants: Plans) -> int:
    """Returns how many of these pairs differ."""
    return len({tuple((variants[c][number].plan.kind, name) for c, number, name in pair) for pair in pairs})


def _shapes(chunks: Sequence[Chunk], graph: PipelineGraph, buckets: Buckets) -> tuple[tuple[ChunkShapes, ...], ...]:
    absent = (absent_chunks(chunks, graph, bucket) for bucket in buckets.specs)
    return tuple(derive_shapes(chunks, graph, *each) for each in zip(buckets.specs, absent, strict=True))


def _lies_as(array: jax.Array, spec: Any) -> bool:
    return array.sharding.is_equivalent_to(spec.sharding, array.ndim)


def _lying_as(array: Any, spec: jax.ShapeDtypeStruct) -> Any:
    """Returns the array, moved to the devices that the spec names."""
    if not isinstance(array, jax.Array) or _lies_as(array, spec):
        return array
    return jax.device_put(array, spec.sharding)


def _filled_in(state: Any, fresh: Callable[[], Any]) -> Any:
    """Returns the optimizer state with the values of a fresh one for its specs; makes that only where there are any."""
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        return state
    return jax.tree.map(lambda held, new: new if isinstance(held, jax.ShapeDtypeStruct) else held, state, fresh())


def _least_programs(chunk: Chunk, buckets: Buckets) -> int:
    """Returns a lower bound of a chunk's programs: one for all leaves that it reads of some bucket."""
    needed = {*chunk.leaves} - chunk.optional_leaves
    return len(
        {
            tuple((name, bucket[name].shape, bucket[name].dtype) for name in chunk.leaves if name in bucket)
            for bucket in buckets.specs
            if needed <= bucket.keys()
        }
    )


def _check_number(number: int, most: int | None, num_buckets: int, *, at_least: bool) -> None:
    if most is not None and number > most:
        raise ValueError(
            f"{num_buckets} buckets would compile {'at least ' if at_least else ''}{number} different programs, more "
            f"than max_programs {most}: give fewer buckets, or raise max_programs"
        )
