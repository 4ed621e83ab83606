"""Stages on which two steps are under way: their judge, all interleavings of small pipelines, and random walks.

The judge knows the contract of every step (:mod:`tests.model_checker.contract`) and what holds between two steps:

* step t + 1 may start while step t is under way, and step t + 2 once step t has ended on the stage; on a stage without
  a delay step t + 1 starts once step t has ended there;
* one task runs at a time, of either step;
* the microbatches of both steps share one window. An F that starts to hold one needs a free slot, and afterwards the
  oldest unfinished microbatch of both steps, those of the older step first, has a slot or finds a free one;
* R and U of step t + 1 run after step t has ended on the stage;
* the stage does not idle while a task of either step may run.
"""

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Any, NamedTuple

from rrfp_jax.core import (
    Event,
    FinishStep,
    IllegalTransition,
    Instruction,
    RunTask,
    Send,
    StepStarted,
    TaskFinished,
)
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.schedules import TaskKind
from tests.model_checker.account import places_of
from tests.model_checker.automaton import Fault
from tests.model_checker.contract import Wiring, wiring
from tests.model_checker.explore import Report, Search
from tests.model_checker.judge import stuck
from tests.model_checker.packets import Packets, Stimulus
from tests.model_checker.setting import Setting
from tests.model_checker.trace import CheckError, Violation

DELAYS_S = (0, 0, 0, 1, 1, 2, 3, 5, 20, 100)


class Book(NamedTuple):
    """What has happened at a place, as bits: tasks by step, packets of all steps."""

    under_way: tuple[int, ...] = ()
    """The steps that have started and not ended, the older one first."""
    num_started: int = 0
    """How many steps have started."""
    started: tuple[int, ...] = ()
    """The tasks of each step under way that have started."""
    finished: tuple[int, ...] = ()
    delivered: int = 0
    sent: int = 0

    def replaced(self, name: str, step: int, bits: int) -> "Book":
        values: list[int] = list(getattr(self, name))
        values[self.under_way.index(step)] |= bits
        changed: dict[str, Any] = {name: tuple(values)}
        return self._replace(**changed)


class OverlapJudge:
    """Follows one place of a setting; raises :class:`Violation`."""

    def __init__(self, setting: Setting, place: int, wires: Wiring) -> None:
        self.contracts, self.packets, self.name = wires.contracts[place], wires.packets, setting.name(place)
        self.window = setting.windows[setting.places[place].stage]
        self.num_steps, self.most = setting.num_steps, 1 + setting.delays[setting.places[place].stage]

    def may_start(self, book: Book, step: int) -> bool:
        return step == book.num_started and len(book.under_way) < self.most

    def is_done(self, book: Book) -> bool:
        return book.num_started == self.num_steps and not book.under_way

    def running(self, book: Book) -> list[tuple[int, int]]:
        """The tasks that run, each as a step and a number."""
        steps = zip(book.under_way, book.started, book.finished, strict=True)
        return [(step, n) for step, started, finished in steps for n in places_of(started & ~finished)]

    def follow(self, book: Book, event: Event, bit: int, instructions: list[Instruction]) -> Book:
        """Returns the book after an event, of which ``bit`` is the packet, and its answers."""
        if isinstance(event, StepStarted):
            book = book._replace(
                under_way=(*book.under_way, event.step),
                num_started=event.step + 1,
                started=(*book.started, 0),
                finished=(*book.finished, 0),
            )
        elif isinstance(event, TaskFinished):
            place = self.contracts[event.step].place[event.task]
            book = book.replaced("finished", event.step, 1 << place)
        book = book._replace(delivered=book.delivered | bit)
        for instruction in sorted(instructions, key=lambda one: isinstance(one, RunTask)):
            # Runs are looked at behind the end of a step, which may let them run.
            if isinstance(instruction, RunTask):
                book = self._run(book, instruction)
            elif isinstance(instruction, Send):
                book = self._send(book, instruction)
            elif isinstance(instruction, FinishStep):
                book = self._finish_step(book, instruction.step)
            else:
                raise Violation(f"{self.name} answers with {instruction}")
        if not self.running(book):
            for step in book.under_way:
                for n, task in enumerate(self.contracts[step].tasks):
                    if self._why_not(book, step, n) is None:
                        raise Violation(f"{self.name} idles although {task} of step {step} may run")
        return book

    def _run(self, book: Book, run: RunTask) -> Book:
        step, task = run
        if step not in book.under_way or task not in self.contracts[step].place:
            raise Violation(f"{self.name} runs {task} of step {step}, which it has not")
        if self.running(book):
            raise Violation(f"{self.name} runs {task} of step {step} beside another task")
        place = self.contracts[step].place[task]
        why_not = self._why_not(book, step, place)
        if why_not is not None:
            raise Violation(f"{self.name} runs {task} of step {step}, {why_not}")
        return book.replaced("started", step, 1 << place)

    def _why_not(self, book: Book, step: int, n: int) -> str | None:
        """Why a task may not start; None if it may."""
        contract, at = self.contracts[step], book.under_way.index(step)
        needs, started, finished = contract.needs[n], book.started[at], book.finished[at]
        if started >> n & 1:
            return "for the second time"
        if (needs.tasks | needs.ended) & ~finished or needs.packets & ~book.delivered:
            return "which lacks something"
        task = contract.tasks[n]
        if task.kind in (TaskKind.R, TaskKind.U) and at:
            return "although the step before has not ended"
        if task.kind is TaskKind.F and not self._admits(book, step, task.microbatch):
            return "which the window does not admit"
        return None

    def _admits(self, book: Book, step: int, microbatch: int) -> bool:
        held, left = set(), []
        for at, other in enumerate(book.under_way):
            contract = self.contracts[other]
            for m, tasks in enumerate(contract.of_microbatch):
                if tasks & ~book.finished[at]:
                    left.append((other, m))
                    if tasks & contract.forwards & book.started[at]:
                        held.add((other, m))
        asked = (step, microbatch)
        if asked in held:
            return True
        held.add(asked)
        return len(held) < self.window or (len(held) == self.window and left[0] in held)

    def _send(self, book: Book, send: Send) -> Book:
        step, message, stage = send
        promise = self.contracts[step].sends.get((message, stage))
        what = f"{self.name} sends the {message} of step {step} to stage {stage}"
        if promise is None or step not in book.under_way:
            raise Violation(f"{what}, which nobody expects")
        if promise.sent & book.sent:
            raise Violation(f"{what} for the second time")
        if promise.tasks & ~book.finished[book.under_way.index(step)] or promise.packets & ~book.delivered:
            raise Violation(f"{what} too soon")
        return book._replace(sent=book.sent | promise.sent)

    def _finish_step(self, book: Book, step: int) -> Book:
        if step != book.under_way[0]:
            raise Violation(f"{self.name} ends step {step}, and step {book.under_way[0]} before it is under way")
        contract = self.contracts[step]
        sends = sum(promise.sent for promise in contract.sends.values())
        everything = (1 << len(contract.tasks)) - 1
        if everything & ~book.finished[0] or contract.inputs & ~book.delivered or sends & ~book.sent:
            raise Violation(f"{self.name} ends step {step} with something left over")
        return book._replace(under_way=book.under_way[1:], started=book.started[1:], finished=book.finished[1:])


class OverlapAutomaton:
    """The states of one place that have come up so far, as :class:`tests.model_checker.automaton.PlaceAutomaton` has
    them: every delivery and every end of a task is a move."""

    def __init__(self, setting: Setting, place: int, wires: Wiring) -> None:
        self.sent: list[int] = []
        self.delivered: list[int] = []
        self.is_done: list[bool] = []
        self.targets: dict[tuple[int, int], tuple[int, ...]] = {}
        self._place, self._packets = place, wires.packets
        self._judge = OverlapJudge(setting, place, wires)
        self._arbiters: list[OverlappedArbiter] = []
        self._books: list[Book] = []
        self._numbers: dict[Hashable, int] = {}
        self._moves: dict[tuple[int, Hashable], int] = {}
        self._number(setting.make_arbiter(place), Book())  # type: ignore[arg-type]

    def expand(self, state: int, in_flight: int) -> tuple[int, ...]:
        targets = tuple(dict.fromkeys(self._target(state, *move) for move in self._possible(state, in_flight)))
        self.targets[state, in_flight] = targets
        return targets

    def moves(self, state: int, in_flight: int) -> list["_Move"]:
        return [_Move(self._target(state, *move), move[0]) for move in self._possible(state, in_flight)]

    def stimuli(self, move: "_Move") -> list[Stimulus]:
        return [Stimulus(self._place, move.event)]

    def _possible(self, state: int, in_flight: int) -> list[tuple[Event, int]]:
        book, judge = self._books[state], self._judge
        found: list[tuple[Event, int]] = []
        for bit in Packets.split(in_flight):
            event = self._packets.event(bit)
            if not isinstance(event, StepStarted) or judge.may_start(book, event.step):
                found.append((event, bit))
        for step, n in judge.running(book):
            found.append((TaskFinished(step, 0.0, judge.contracts[step].tasks[n]), 0))
        return found

    def _target(self, state: int, event: Event, bit: int) -> int:
        key = (state, bit or event)
        if key not in self._moves:
            arbiter = self._arbiters[state].copy()
            try:
                instructions = arbiter.handle(event)
                book = self._judge.follow(self._books[state], event, bit, instructions)
                self._moves[key] = self._number(arbiter, book)
            except (Violation, IllegalTransition, AssertionError) as error:
                what = str(error) or f"an invariant of the arbiter is broken: {error!r}"
                raise Fault(what, [Stimulus(self._place, event)]) from error
        return self._moves[key]

    def _number(self, arbiter: OverlappedArbiter, book: Book) -> int:
        key = (arbiter.key(), book)
        number = self._numbers.get(key)
        if number is None:
            arbiter.validate()
            number = self._numbers[key] = len(self._arbiters)
            self._arbiters.append(arbiter)
            self._books.append(book)
            self.sent.append(book.sent)
            self.delivered.append(book.delivered)
            self.is_done.append(self._judge.is_done(book))
        return number


class _Move(NamedTuple):
    target: int
    event: Event


def explore_overlapped(setting: Setting) -> Report:
    """Explore every interleaving; raises CheckError at the first violation or deadlock."""
    wires = wiring(setting)
    automata = [OverlapAutomaton(setting, place, wires) for place in range(setting.num_places)]
    search = Search(setting, wires, automata)  # type: ignore[arg-type]
    num_transitions, frontier = 0, [search.start]
    while frontier:
        frontier, num_new = search.advance(frontier)
        num_transitions += num_new
    return Report(len(search.came_from), num_transitions)


def overlapped_walk(setting: Setting, draw: Callable[[int], int]) -> int:
    """Run a setting once with drawn delays, some messages twice; returns the number of events, raises CheckError."""
    wires = wiring(setting)
    places = range(setting.num_places)
    arbiters = [setting.make_arbiter(place) for place in places]
    judges = [OverlapJudge(setting, place, wires) for place in places]
    books = [Book() for _ in places]
    starts = [[setting.start_of(step) for step in range(setting.num_steps)] for _ in places]
    trace: list[Stimulus] = []
    queue: list[tuple[float, int, int, Event, int]] = []
    num_posted = 0

    def post(now_s: float, place: int, event: Event, bit: int = 0) -> None:
        nonlocal num_posted
        num_posted += 1
        heappush(queue, (now_s + DELAYS_S[draw(len(DELAYS_S))], num_posted, place, event, bit))

    def send(now_s: float, place: int, instruction: Send) -> None:
        promise = wires.contracts[place][instruction.step].sends[instruction.message, instruction.stage]
        for bit in Packets.split(promise.sent):
            target, _ = wires.packets.sent[bit.bit_length() - 1]
            for _ in range(1 + (draw(7) == 0)):
                post(now_s, target, wires.packets.event(bit), bit)

    for place in places:
        post(0.0, place, starts[place].pop(0))
    while queue:
        now_s, _, place, event, bit = heappop(queue)
        trace.append(Stimulus(place, event._replace(time_s=float(now_s))))
        try:
            instructions = arbiters[place].handle(trace[-1].event)
            books[place] = judges[place].follow(books[place], event, bit, instructions)
            arbiters[place].validate()
        except (Violation, IllegalTransition, AssertionError) as error:
            what = str(error) or f"an invariant of the arbiter is broken: {error!r}"
            raise CheckError(what, setting, tuple(trace)) from error
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                post(now_s, place, TaskFinished(instruction.step, 0.0, instruction.task))
            elif isinstance(instruction, Send):
                send(now_s, place, instruction)
        # The next start is under way as soon as it may come: each place has one on its way at most.
        is_start_coming = any(to == place and isinstance(each, StepStarted) for _, _, to, each, _ in queue)
        if starts[place] and not is_start_coming and judges[place].may_start(books[place], starts[place][0].step):
            post(now_s, place, starts[place].pop(0))
    unfinished = [place for place in places if not judges[place].is_done(books[place])]
    if unfinished:
        raise CheckError(stuck(setting, unfinished), setting, tuple(trace))
    return len(trace)
