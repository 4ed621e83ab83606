"""What a correct stage does in one step, derived from the graph alone and not from the arbiter's plan.

Tasks and packets (a message to a stage in a step, or the start of a step) are bits, so that a stage's history is a few
integers. ``Contract.needs`` says what must have finished on the stage, and what must have reached it, before a task may
start; ``Contract.sends`` says the same of every message that the stage must send, once.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from rrfp_jax.arbitration import Agreement, Event, InputArrived, Message, MessageKind, StepStarted
from rrfp_jax.checking.setting import Setting
from rrfp_jax.checking.trace import Stimulus
from rrfp_jax.tasks import Task, TaskKind

MessageBit = Callable[[int, Message, int], int]


class Needs(NamedTuple):
    """What must come before: finished tasks of the stage and delivered packets, as bits."""

    tasks: int
    packets: int


class Promise(NamedTuple):
    """A message that the stage must send: its packet's bit, and what must come before."""

    packet: int
    tasks: int
    packets: int


class Contract(NamedTuple):
    """One stage's part in one step."""

    tasks: tuple[Task, ...]
    place: dict[Task, int]
    needs: tuple[Needs, ...]
    sends: dict[tuple[Message, int], Promise]
    """By message and receiving stage."""
    inputs: int
    """The packets of this step that the stage receives."""
    start: int
    """The packet that starts this step."""
    of_microbatch: tuple[int, ...]
    """The tasks of each microbatch."""


class Wiring(NamedTuple):
    """All packets of a setting, and the contracts of every stage and step."""

    packets: tuple[Stimulus, ...]
    contracts: tuple[tuple[Contract, ...], ...]
    """``contracts[stage][step]``."""
    inboxes: tuple[int, ...]
    """The packets of each stage."""
    earlier: tuple[int, ...]
    """For each packet the packets that reach the stage before: the starts of steps come in order."""


def wiring(setting: Setting) -> Wiring:
    """Number the packets of a setting and derive its contracts."""
    return _WiringBuilder(setting).build()


class _WiringBuilder:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bits: dict[Stimulus, int] = {}

    def build(self) -> Wiring:
        setting = self.setting
        stages, steps = range(setting.num_stages), range(setting.num_steps)
        starts = [
            [self._bit(stage, StepStarted(step, 0.0, setting.absences[step])) for step in steps] for stage in stages
        ]
        demands = [_StepDemands(setting, step, self._message_bit) for step in steps]
        contracts = tuple(
            tuple(demands[step].contract(stage, starts[stage][step]) for step in steps) for stage in stages
        )
        packets = tuple(self.bits)
        inboxes = [0] * setting.num_stages
        for stimulus, bit in self.bits.items():
            inboxes[stimulus.stage] |= bit
        earlier = tuple(
            starts[stage][event.step - 1] if isinstance(event, StepStarted) and event.step else 0
            for stage, event in packets
        )
        return Wiring(packets, contracts, tuple(inboxes), earlier)

    def _bit(self, stage: int, event: Event) -> int:
        return self.bits.setdefault(Stimulus(stage, event), 1 << len(self.bits))

    def _message_bit(self, step: int, message: Message, stage: int) -> int:
        return self._bit(stage, InputArrived(step, 0.0, message))


class _StepDemands:
    """Who needs what in one step, over all stages."""

    def __init__(self, setting: Setting, step: int, message_bit: MessageBit) -> None:
        self.rules, self.placement, self.step = setting.rules, setting.placement, step
        self.graph = setting.graph_of_step(step)
        self.message_bit = message_bit
        self.local: dict[Task, set[Task]] = defaultdict(set)
        self.remote: dict[Task, set[Message]] = defaultdict(set)
        self.sends: dict[tuple[Message, int], tuple[int, set[Task], set[Message]]] = {}
        self.received: dict[int, set[Message]] = defaultdict(set)
        self.tasks = list(self.graph.tasks())
        trained = [c for c in range(self.graph.num_chunks) if self.graph.has_backward(c)] if self.rules.updates else []
        self.last = [Task(kind, c) for kind in (TaskKind.R, TaskKind.U) for c in trained]
        self._demand_dependencies()
        self._demand_reductions()
        self._demand_agreement()

    def stage_of(self, task: Task) -> int:
        return self.placement.stage_of_chunk[task.chunk]

    def _promise(self, message: Message, sender: int, receiver: int, tasks: set[Task], inputs: set[Message]) -> None:
        self.sends[message, receiver] = (sender, tasks, inputs)
        self.received[receiver].add(message)

    def _demand_dependencies(self) -> None:
        for task in self.tasks:
            for dependency in self.graph.dependencies(task):
                sender, receiver = self.stage_of(dependency), self.stage_of(task)
                if sender == receiver:
                    self.local[task].add(dependency)
                    continue
                kind = MessageKind.ACTIVATION if dependency.kind is TaskKind.F else MessageKind.GRADIENT
                message = Message(kind, dependency.chunk, task.chunk, task.microbatch)
                self.remote[task].add(message)
                self._promise(message, sender, receiver, {dependency}, set())
            if self.rules.ordered and task.kind is self.graph.accumulating_kind(task.chunk):
                self.local[task] |= {Task(task.kind, task.chunk, m) for m in range(task.microbatch)} & set(self.tasks)

    def _demand_reductions(self) -> None:
        for task in self.last:
            stage = self.stage_of(task)
            if task.kind is TaskKind.U:
                self.local[task].add(Task(TaskKind.R, task.chunk))
                continue
            self.local[task] |= {
                t for t in self.last if t.kind is TaskKind.R and t.chunk < task.chunk and self.stage_of(t) == stage
            }
            for sharer in self.graph.sharing(task.chunk):
                gradients = (
                    {t for t in self.graph.tasks([sharer]) if t.kind is self.graph.accumulating_kind(sharer)}
                    if self.graph.has_backward(sharer)
                    else set()
                )
                if self.placement.stage_of_chunk[sharer] == stage:
                    self.local[task] |= gradients
                elif self.graph.has_backward(sharer):
                    message = Message(MessageKind.SHARED, sharer, task.chunk)
                    self.remote[task].add(message)
                    self._promise(message, self.placement.stage_of_chunk[sharer], stage, gradients, set())

    def _demand_agreement(self) -> None:
        if self.rules.agreement is Agreement.NONE:
            return
        reported: dict[int, set[Task]] = defaultdict(set)
        for task in (*self.tasks, *self.last):
            if self.rules.agreement is Agreement.ALL:
                if task.kind is not TaskKind.U:
                    reported[self.stage_of(task)].add(task)
            elif not self.graph.successors(task.chunk) and task.kind is TaskKind.F:
                reported[self.stage_of(task)].add(task)
        stages = range(self.placement.num_stages)
        reporters = [s for s in stages if self._reports(s)]
        first = reporters[0]
        reports = set()
        for stage in reporters[1:]:
            report = Message(MessageKind.REPORT, stage, first)
            reports.add(report)
            self._promise(report, stage, first, reported[stage], set())
        for stage in stages:
            if stage != first:
                self._promise(Message(MessageKind.VERDICT, first, stage), first, stage, reported[first], reports)
        for update in (task for task in self.last if task.kind is TaskKind.U):
            stage = self.stage_of(update)
            if stage == first:
                self.local[update] |= reported[first]
                self.remote[update] |= reports
            else:
                self.remote[update].add(Message(MessageKind.VERDICT, first, stage))

    def _reports(self, stage: int) -> bool:
        chunks = self.placement.chunks_of_stage[stage]
        return self.rules.agreement is Agreement.ALL or any(not self.graph.successors(c) for c in chunks)

    def contract(self, stage: int, start: int) -> Contract:
        tasks = tuple(t for t in (*self.tasks, *self.last) if self.stage_of(t) == stage)
        place = {task: number for number, task in enumerate(tasks)}

        def task_bits(some: set[Task]) -> int:
            return sum(1 << place[task] for task in some)

        def packet_bits(some: set[Message]) -> int:
            return sum(self.message_bit(self.step, message, stage) for message in some)

        return Contract(
            tasks=tasks,
            place=place,
            needs=tuple(Needs(task_bits(self.local[t]), packet_bits(self.remote[t])) for t in tasks),
            sends={
                (message, receiver): Promise(
                    self.message_bit(self.step, message, receiver), task_bits(after), packet_bits(inputs)
                )
                for (message, receiver), (sender, after, inputs) in self.sends.items()
                if sender == stage
            },
            inputs=packet_bits(self.received[stage]),
            start=start,
            of_microbatch=tuple(
                task_bits({t for t in tasks if t.microbatch == m}) for m in range(self.graph.num_microbatches)
            ),
        )
