"""What a correct stage does in one step, derived from the graph alone and not from the arbiter's plan.

Tasks and packets (:mod:`tests.model_checker.packets`) are bits, so that a stage's history is a few integers.
``Contract.needs`` says what must have finished on the stage, and what must have reached it, before a task may start;
``Contract.sends`` says the same of every message that the stage must send, once.

What operations add to this is in :mod:`tests.model_checker.operations`.

Where a stage spans several processes, each is a place with this contract of its own. A message goes to every member of
the receiving group: to member j of k from member j * n // k of the n members of the sending one.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from rrfp_jax.core import Agreement, InputArrived, InputPromised, Message, MessageKind
from rrfp_jax.schedules import COMPUTE, Task, TaskKind
from tests.model_checker.operations import Operations
from tests.model_checker.packets import Packets
from tests.model_checker.setting import Setting


class Needs(NamedTuple):
    """What must come before: tasks of the stage and delivered packets, as bits."""

    tasks: int
    ended: int
    """Those of the tasks whose real end counts, because others hear of it first."""
    packets: int


class Promise(NamedTuple):
    """A message that the stage must send: the packets that it is, one per receiving place, and what comes before."""

    sent: int
    tasks: int
    packets: int


class Contract(NamedTuple):
    """One place's part in one step."""

    tasks: tuple[Task, ...]
    place: dict[Task, int]
    needs: tuple[Needs, ...]
    sends: dict[tuple[Message, int], Promise]
    """By message and receiving stage."""
    inputs: int
    """The packets of this step that the place receives."""
    start: int
    """The packet that starts this step."""
    compute: int
    """The tasks of the stage's own lane."""
    engines: dict[str, int]
    """The tasks of each lane beside it."""
    of_microbatch: tuple[int, ...]
    """The tasks of each microbatch."""
    forwards: int
    """The F among the tasks."""
    weights: tuple[int, ...]
    """What each microbatch weighs; empty: they are counted."""
    promises: dict[tuple[Message, int], int]
    """For what is announced, by message and receiving stage, the packet that says so, where inputs are promised."""
    promised_by: dict[int, int]
    """For the packets that the place receives: the packet that promises each."""
    taken: dict[int, dict[int, Needs]]
    """For each chunk that runs F only for others, and each of its microbatches: what must come before nobody waits for
    its output any more."""


class Wiring(NamedTuple):
    """The packets of a setting, and the contracts of every place and step."""

    packets: Packets
    contracts: tuple[tuple[Contract, ...], ...]
    """``contracts[place][step]``."""
    starts: int
    """The starts of all steps everywhere, which are under way from the beginning."""


def wiring(setting: Setting) -> Wiring:
    """Number the packets of a setting and derive its contracts."""
    packets = Packets(setting.num_places)
    demands = [_StepDemands(setting, step, packets) for step in range(setting.num_steps)]
    contracts = []
    for place in range(setting.num_places):
        start, own = 0, []
        for step, demand in enumerate(demands):
            start = packets.bit(place, setting.start_of(step), after=start)
            own.append(demand.contract(place, start))
        contracts.append(tuple(own))
    return Wiring(packets, tuple(contracts), sum(contract.start for own in contracts for contract in own))


class _StepDemands:
    """Who needs what in one step, over all stages."""

    def __init__(self, setting: Setting, step: int, packets: Packets) -> None:
        self.setting, self.step, self.packets = setting, step, packets
        self.rules, self.placement = setting.rules_of_step(step), setting.placement
        self.graph = setting.graph_of_step(step)
        self.operations = Operations(self.graph)
        self._share = self.graph.num_microbatches // self.graph.num_replicas
        self.local: dict[Task, set[Task]] = defaultdict(set)
        self.ended: dict[Task, set[Task]] = defaultdict(set)
        self.remote: dict[Task, set[Message]] = defaultdict(set)
        self.sends: dict[tuple[Message, int], tuple[int, set[Task], set[Message]]] = {}
        self.received: dict[int, set[Message]] = defaultdict(set)
        self.sums: dict[int, set[Message]] = defaultdict(set)
        """By chunk, the messages that bring the sums of pieces that other replicas add up."""
        self.tasks = list(self.graph.tasks())
        self._group = {c: tuple(group) for group in self.graph.passes for c in group}
        """By chunk, the passes of the same parameters."""
        held = [c for c in range(self.graph.num_chunks) if self._passes(c)[0] == c]
        trained = [c for c in held if self.graph.trains(c)] if self.rules.updates else []
        self.last = [Task(kind, c) for kind in (TaskKind.R, TaskKind.U) for c in trained]
        self._demand_dependencies()
        self._demand_words()
        if self.rules.by_messages and self.graph.num_replicas > 1:
            self._demand_pieces()
        else:
            self._demand_reductions()
        self._demand_agreement()
        if self.graph.ops:
            self._demand_operations()

    def stage_of(self, task: Task) -> int:
        return self.placement.stage_of_chunk[task.chunk]

    def _promise(self, message: Message, sender: int, receiver: int, tasks: set[Task], inputs: set[Message]) -> None:
        self.sends[message, receiver] = (sender, tasks, inputs)
        self.received[receiver].add(message)

    def _demand_dependencies(self) -> None:
        for task in self.tasks:
            for dependency in self.operations.bare_dependencies(task):
                sender, receiver = self.stage_of(dependency), self.stage_of(task)
                if sender == receiver:
                    self.local[task].add(dependency)
                    continue
                kind = MessageKind.ACTIVATION if dependency.kind is TaskKind.F else MessageKind.GRADIENT
                message = Message(kind, dependency.chunk, task.chunk, task.microbatch)
                self.remote[task].add(message)
                self._promise(message, sender, receiver, {dependency}, set())
            adds = self.graph.trains(task.chunk) and task.kind is self.graph.accumulating_kind(task.chunk)
            if self.rules.ordered and adds:
                first = task.microbatch - task.microbatch % self._share if self.rules.by_messages else 0
                passes = self._passes(task.chunk)
                earlier = {Task(task.kind, c, m) for m in range(first, task.microbatch) for c in passes}
                earlier |= {Task(task.kind, c, task.microbatch) for c in passes if c > task.chunk}
                self.local[task] |= earlier & set(self.tasks)

    def _demand_words(self) -> None:
        """Who reads a chunk that runs F only says so, where that one is on another stage."""
        for edge in self.graph.edges:
            source, target = edge[:2]
            sender, receiver = self.placement.stage_of_chunk[target], self.placement.stage_of_chunk[source]
            if sender == receiver or self.graph.has_backward(source):
                continue
            for m in set(self.graph.microbatches(source)) & set(self.graph.microbatches(target)):
                word = Message(MessageKind.TAKEN, target, source, m)
                self._promise(word, sender, receiver, {Task(TaskKind.F, target, m)}, set())

    def _demand_reductions(self) -> None:
        for task in self.last:
            stage = self.stage_of(task)
            if task.kind is TaskKind.U:
                self.local[task].add(Task(TaskKind.R, task.chunk))
                if self.rules.lockstep:
                    own = {t for t in self.last if self.stage_of(t) == stage}
                    self.local[task] |= {t for t in own if t.kind is TaskKind.R or t.chunk < task.chunk}
                continue
            if self.rules.lockstep:
                self.local[task] |= {
                    t for t in self.last if t.kind is TaskKind.R and t.chunk > task.chunk and self.stage_of(t) == stage
                }
            copies = self.graph.num_replicas
            for sharer in (c for c in self.graph.sharing(task.chunk) if c % copies == task.chunk % copies):
                gradients = self._gradients(sharer)
                if self.placement.stage_of_chunk[sharer] == stage:
                    self.local[task] |= gradients
                elif self.graph.trains(sharer):
                    message = Message(MessageKind.SHARED, sharer, task.chunk)
                    self.remote[task].add(message)
                    self._promise(message, self.placement.stage_of_chunk[sharer], stage, gradients, set())
        self._demand_replicas()

    def _passes(self, chunk: int) -> tuple[int, ...]:
        return self._group.get(chunk, (chunk,))

    def _gradients(self, chunk: int) -> set[Task]:
        """The tasks that add to a chunk's gradients, in all its passes."""
        kind = self.graph.accumulating_kind(chunk)
        tasks = self.graph.tasks(self._passes(chunk))
        return {t for t in tasks if t.kind is kind} if self.graph.trains(chunk) else set()

    def _demand_replicas(self) -> None:
        """The replicas' R of a chunk wait for each other: word that all is there goes up a tree of them, and down."""
        sums = {task.chunk: task for task in self.last if task.kind is TaskKind.R}
        num_replicas = self.graph.num_replicas
        for first in range(0, self.graph.num_chunks, num_replicas):
            copies = [c for c in range(first, first + num_replicas) if c in sums]
            above = {place: (place - 1) // self.rules.tree_degree for place in range(1, len(copies))}
            inputs = {place: set(self.remote[sums[chunk]]) for place, chunk in enumerate(copies)}
            up = {place: Message(MessageKind.SHARED, copies[place], copies[over]) for place, over in above.items()}
            for place, over in above.items():
                inputs[over].add(up[place])
            for place, over in above.items():
                source, target = copies[place], copies[over]
                stages = self.placement.stage_of_chunk[source], self.placement.stage_of_chunk[target]
                self._promise(up[place], *stages, self.local[sums[source]] - set(self.last), inputs[place])
                down = Message(MessageKind.SHARED, target, source)
                if over:
                    told = {Message(MessageKind.SHARED, copies[above[over]], target)}
                    self._promise(down, *stages[::-1], set(), told)
                else:
                    self._promise(down, *stages[::-1], self.local[sums[target]] - set(self.last), inputs[0])
                self.remote[sums[source]].add(down)
            if above:
                self.remote[sums[copies[0]]] |= inputs[0]
                for chunk in copies:
                    self.ended[sums[chunk]] |= self.local[sums[chunk]] - set(self.last)

    def _demand_pieces(self) -> None:
        """The replicas add up by messages: piece k at the k-th living one, which hands the sum to the others."""
        stage_of, trained = self.placement.stage_of_chunk, sorted({task.chunk for task in self.last})
        num_replicas = self.graph.num_replicas
        for chunk in trained:
            reduction, update = Task(TaskKind.R, chunk), Task(TaskKind.U, chunk)
            self.local[update].add(reduction)
            self.ended[update].add(reduction)
            # Copies have the same base number; chunks are numbered by base first, and those that are lost do not train.
            copies = [c for c in trained if c - c % num_replicas == chunk - chunk % num_replicas]
            added = [k for k in range(num_replicas) if copies[k % len(copies)] == chunk]
            for sharer in (c for c in self.graph.sharing(chunk) if c in trained):
                gradients = self._gradients(sharer)
                if stage_of[sharer] == stage_of[chunk]:
                    self.local[reduction] |= gradients
                    continue
                pieces = {
                    Message(MessageKind.PIECE, sharer, chunk, k + num_replicas * place)
                    for place in range(self._num_sums(sharer))
                    for k in added
                }
                self.remote[reduction] |= pieces
                for piece in pieces:
                    self._promise(piece, stage_of[sharer], stage_of[chunk], gradients, set())
            for copy in (c for c in copies if c != chunk):
                for k in added:
                    total = Message(MessageKind.SUM, chunk, copy, k)
                    self._promise(total, stage_of[chunk], stage_of[copy], {reduction}, set())
                    self.remote[Task(TaskKind.U, copy)].add(total)
                    self.sums[copy].add(total)
            if self.rules.shares:
                self._demand_shares(chunk, copies)

    def _demand_shares(self, chunk: int, copies: list[int]) -> None:
        """Two replicas update each share, the first that live from its number on; the first sends it to the others."""
        num_replicas = self.graph.num_replicas
        for share in range(num_replicas):
            turns = [(share + n) % num_replicas for n in range(num_replicas)]
            first, *others = [c for turn in turns for c in copies if c % num_replicas == turn]
            for copy in others[1:] if first == chunk else ():
                message = Message(MessageKind.SHARE, chunk, copy, share)
                stages = self.placement.stage_of_chunk[chunk], self.placement.stage_of_chunk[copy]
                self._promise(message, *stages, {Task(TaskKind.U, chunk)}, set())

    def _num_sums(self, chunk: int) -> int:
        """In ordered steps with other owners a chunk makes a sum of each block of microbatches that it runs."""
        given = self.setting.owners[self.step] if self.setting.owners else None
        if not self.rules.ordered or given is None:
            return 1
        number = self.graph.num_replicas
        row = given.owners[self.placement.stage_of_chunk[chunk - chunk % number]]
        return [row[m] for m in range(0, len(row), self._share)].count(chunk % number)

    def _demand_agreement(self) -> None:
        if self.rules.agreement is Agreement.NONE:
            return
        reported: dict[int, set[Task]] = defaultdict(set)
        for task in (*self.tasks, *self.last):
            if self.rules.agreement is Agreement.ALL:
                if task.kind is not TaskKind.U:
                    reported[self.stage_of(task)].add(task)
            elif task.kind is TaskKind.F and (task.chunk in self.graph.losses or not self.graph.successors(task.chunk)):
                reported[self.stage_of(task)].add(task)
        living = [stage for stage in range(self.placement.num_stages) if stage not in self.setting.lost]
        root, degree = living[0], self.rules.tree_degree
        above = {stage: living[(place - 1) // degree] for place, stage in enumerate(living) if place}
        reports = self._sums_before_reports()
        for stage, target in above.items():
            reports[target].add(Message(MessageKind.REPORT, stage, target))
        for stage, target in above.items():
            report = Message(MessageKind.REPORT, stage, target)
            self._promise(report, stage, target, reported[stage], reports[stage])
            verdict = Message(MessageKind.VERDICT, target, stage)
            if target != root:
                self._promise(verdict, target, stage, set(), {Message(MessageKind.VERDICT, above[target], target)})
            else:
                self._promise(verdict, root, stage, reported[root], reports[root])
        for update in (task for task in self.last if task.kind is TaskKind.U):
            stage = self.stage_of(update)
            if stage != root:
                self.remote[update].add(Message(MessageKind.VERDICT, above[stage], stage))
            else:
                self.local[update] |= reported[root]
                self.ended[update] |= reported[root]
                self.remote[update] |= reports[root]

    def _sums_before_reports(self) -> dict[int, set[Message]]:
        """By stage, the sums that must be here before it reports."""
        before: dict[int, set[Message]] = defaultdict(set)
        if self.rules.agreement is Agreement.ALL:
            for chunk, sums in self.sums.items():
                before[self.placement.stage_of_chunk[chunk]] |= sums
        return before

    def _demand_operations(self) -> None:
        """What operations wait for and what waits for them; on engines real ends count, as copies queue nowhere."""
        tasks = {*self.tasks, *self.last, *self.operations.once}
        for task, needed in self.operations.needs.items():
            if task in tasks:
                self.local[task] |= needed & tasks
        for task in tasks:
            if self.setting.has_row(self.stage_of(task)) or task.kind in self.operations.by_kind:
                continue
            for operation in self.operations.taken_back_for(task):
                self.remote[operation] |= self.remote[task]
                self.local[operation] |= {needed for needed in self.local[task] if needed.chunk != task.chunk}
        for task in tasks:
            if self.operations.lane(task) != COMPUTE:
                self.ended[task] |= self.local[task]

    def contract(self, place: int, start: int) -> Contract:
        stage = self.setting.places[place].stage
        tasks = tuple(t for t in (*self.tasks, *self.last, *self.operations.once) if self.stage_of(t) == stage)
        lanes: dict[str, set[Task]] = {COMPUTE: set()}
        for task in tasks:
            lanes.setdefault(self.operations.lane(task), set()).add(task)
        places = {task: number for number, task in enumerate(tasks)}

        def task_bits(some: set[Task]) -> int:
            return sum(1 << places[task] for task in some)

        def packet_bits(some: set[Message]) -> int:
            return sum(self._packet(message, place) for message in some)

        return Contract(
            tasks=tasks,
            place=places,
            needs=tuple(
                Needs(task_bits(self.local[t]), task_bits(self.ended[t]), packet_bits(self.remote[t])) for t in tasks
            ),
            sends={
                (message, receiver): Promise(
                    self._copies(message, place, receiver), task_bits(after), packet_bits(inputs)
                )
                for (message, receiver), (sender, after, inputs) in self.sends.items()
                if sender == stage
            },
            inputs=packet_bits(self.received[stage]),
            start=start,
            compute=task_bits(lanes.pop(COMPUTE)),
            engines={lane: task_bits(of_lane) for lane, of_lane in lanes.items()},
            of_microbatch=tuple(
                task_bits({t for t in tasks if t.microbatch == m}) for m in range(self.graph.num_microbatches)
            ),
            forwards=task_bits({t for t in tasks if t.kind is TaskKind.F}),
            weights=self.setting.start_of(self.step).weights,
            promises={
                (message, receiver): self._promise_of(message, receiver)
                for (message, receiver), (sender, _, _) in self.sends.items()
                if sender == stage and self._is_promised(message)
            },
            promised_by={
                self._packet(message, place): self._promise_of(message, stage)
                for message in self.received[stage]
                if self._is_promised(message)
            },
            taken={
                c: {m: self._taken(c, m, task_bits, packet_bits) for m in self.graph.microbatches(c)}
                for c in self.placement.chunks_of_stage[stage]
                if self.graph.successors(c) and not self.graph.has_backward(c)
            },
        )

    def _taken(
        self, chunk: int, m: int, task_bits: Callable[[set[Task]], int], packet_bits: Callable[[set[Message]], int]
    ) -> Needs:
        stage_of = self.placement.stage_of_chunk
        readers = [s for s in self.graph.successors(chunk) if self.graph.exists(s, m)]
        here = {Task(TaskKind.F, c, m) for c in (chunk, *readers) if stage_of[c] == stage_of[chunk]}
        words = {Message(MessageKind.TAKEN, s, chunk, m) for s in readers if stage_of[s] != stage_of[chunk]}
        return Needs(task_bits(here), 0, packet_bits(words))

    def _is_promised(self, message: Message) -> bool:
        return self.setting.awaits_inputs and message.kind in (MessageKind.ACTIVATION, MessageKind.GRADIENT)

    def _promise_of(self, message: Message, stage: int) -> int:
        return self.packets.bit(self.setting.place(stage, 0), InputPromised(self.step, 0.0, message))

    def _packet(self, message: Message, place: int) -> int:
        return self.packets.bit(place, InputArrived(self.step, 0.0, message))

    def _copies(self, message: Message, place: int, stage: int) -> int:
        """What this place's copy of a message is: a packet to each member of ``stage`` that it serves.

        A member that serves none sends all the same; its packet goes nowhere.
        """
        sender, member = self.setting.places[place]
        num_senders, num_receivers = self.setting.group_size(sender), self.setting.group_size(stage)
        served = [j for j in range(num_receivers) if j * num_senders // num_receivers == member]
        return sum(self._packet(message, self.setting.place(stage, j)) for j in served) or self._packet(
            message, -1 - place
        )
