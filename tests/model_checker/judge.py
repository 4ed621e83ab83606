"""The judge of one place: follows its events and instructions and knows nothing of how the arbiter decides.

It keeps an :class:`Account`, a few integers, and raises :class:`Violation` where an instruction breaks the stage's
contract:

* a task runs that is not the stage's, has run before, or lacks a dependency; or too many run at once. Of the stage's
  own tasks those count as done that have finished, and the one that is due: the last one handed over, from when the
  stage is told that it is about to end, or from its start where certain choices go early. One task more may run then.
  Messages, the step's end and the tasks of engines
  beside compute wait for real ends;
* an engine beside compute runs two tasks at once, or one although another one that stands before it in the table's row
  is ready and admissible, except on a member of a group, as it may not be so on the others;
* the stage holds more microbatches than its window, or more than its capacity where these have weights, counted from
  the tasks that started and finished;
* a chunk that runs F only has produced more than its bound of what its readers have not taken;
* strict consumption leaves its row, or runs what its table pairs one by one, where stages join tasks;
* a pair is none: its tasks must be of kinds that may join, and ready by themselves, W of the very I excepted;
* a message is sent that nobody expects, for the second time, or before what it carries is complete;
* a step ends with a task, message or input left over;
* the stage, or an engine of it, idles although a task is ready that window and memory admit (readiness means to skip
  what is absent, never to wait; engines never wait, not under strict consumption either). A member of a group may idle
  so, since the others may not be ready;
* a member of a group gives another one the same note twice, or gives one to nobody;
* what :mod:`tests.model_checker.guidance` demands of memory, announcements and holds is not so. A leader may hold for
  what has arrived on itself and not on the others.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rrfp_jax.core import (
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    GroupHeard,
    GroupProtocol,
    InputArrived,
    InputPromised,
    Instruction,
    Message,
    MessageKind,
    RunInstruction,
    RunPair,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    TellGroup,
    WakeAt,
)
from rrfp_jax.schedules import Task
from tests.model_checker.account import Account, places_of
from tests.model_checker.admission import Admission
from tests.model_checker.contract import Contract, Wiring
from tests.model_checker.guidance import Guidance
from tests.model_checker.packets import Joined
from tests.model_checker.setting import Setting
from tests.model_checker.trace import Violation


class StageJudge:
    """Follows one place of a setting. ``demand_work`` False leaves idling to show as a deadlock, if it leads to one."""

    def __init__(self, setting: Setting, place: int, wiring: Wiring, *, demand_work: bool = True) -> None:
        self.place, self.name = place, setting.name(place)
        stage, self.member = setting.places[place]
        self.others = [other for other in setting.group_of(place) if other != place]
        self.members = {setting.places[other].member: other for other in self.others}
        self.is_collective = setting.collective
        self.contracts, self.packets = wiring.contracts[place], wiring.packets
        policy = setting.policies[stage]
        self.row = policy if isinstance(policy, tuple) else None
        self.guidance = Guidance(setting, place, self.contracts)
        self.admission = Admission(setting, place, self.guidance)
        self.has_foresight = setting.foresight is not None
        """Of the setting; a follower hears announcements too, and does nothing about them."""
        self.counts_on = setting.certain_ahead and not (len(self.others) and setting.protocol is GroupProtocol.PROPOSE)
        """Whether each task is due from its start."""
        self.is_told = setting.decides_early
        """Whether the place is told that a task is about to end."""
        self.awaits_inputs = setting.awaits_inputs
        self.pairs = setting.pairs
        self.decides_early = setting.keeps_order
        """Whether tasks may be handed over behind running ones, on a device that keeps to its order."""
        self.demand_work = demand_work and not self.others
        self._others: dict[int, StageJudge] = {}
        """What judges the steps that evaluate, and those with other owners."""
        if setting.evaluation is not None:
            of_evaluation = StageJudge(setting.evaluation, place, wiring, demand_work=demand_work)
            self._others = dict.fromkeys(setting.evaluates, of_evaluation)
        for step, given in enumerate(setting.owners):
            if given is not None:
                self._others[step] = StageJudge(setting.with_owners(given), place, wiring, demand_work=demand_work)

    def follow(self, account: Account, event: Event, instructions: list[Instruction]) -> Account:
        """The account after an event and the instructions that answered it; raises Violation."""
        before = self._begun(account)
        account = self._take(account, event, instructions)
        return self._others.get(account.step, self)._follow(account, instructions, before)

    def _follow(self, account: Account, instructions: list[Instruction], before: tuple[int, ...]) -> Account:
        """``before``: what the device had begun before the event."""
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                account = self._run(account, instruction)
                self._check_alone(instruction.task)
            elif isinstance(instruction, RunPair):
                account = self._run_pair(account, instruction)
            elif isinstance(instruction, Send):
                account = self._send(account, instruction)
            elif isinstance(instruction, TellGroup):
                account = self._tell(account, instruction)
            elif isinstance(instruction, WakeAt):
                account = self._ask_for_tick(account, instruction)
            elif isinstance(instruction, FinishStep):
                account = self._finish_step(account, instruction)
            elif self.awaits_inputs:  # an announcement
                promise = self._active(account, instruction).promises.get(instruction[1:], 0)
                account = account._replace(sent=account.sent | promise)
        begun = [task for i in instructions for task in tasks_of(i)]
        if self.counts_on or self.awaits_inputs:
            begun = [self._task(account, bit) for bit in self._begun(account) if bit not in before]
        wrong = self.guidance.wrong_announcement(account, instructions, begun)
        if wrong is not None:
            raise Violation(f"{self.name} {wrong}")
        if self.demand_work:
            self._check_idling(account)
        return self._end_vain_hold(account)

    def _begun(self, account: Account) -> tuple[int, ...]:
        """The tasks of the device's queue that are announced: the first one, or all where they are as they are handed
        over, but for those whose inputs are not there."""
        if not account.queue:
            return ()
        needs = self.contracts[account.step].needs
        queue = account.queue[:1] if self.counts_on else account.queue
        return tuple(bit for bit in queue if not needs[bit.bit_length() - 1].packets & ~account.delivered)

    def _take(self, account: Account, event: Event, instructions: list[Instruction]) -> Account:
        if isinstance(event, TaskFinished):
            return self._finish(account, event)
        if isinstance(event, DecideNow):
            return self._decide(account, event)
        if isinstance(event, ClockTick):
            return self._tick(account, event, instructions)
        if isinstance(event, TaskAnnounced):
            return account
        account = account._replace(delivered=account.delivered | self.packets.known(self.place, event))
        if isinstance(event, StepStarted):
            account = account._replace(step=event.step, is_active=True, started=0, finished=0)
        return account

    def running(self, account: Account) -> list[Task]:
        """The tasks that have started and not finished."""
        if not account.is_active:
            return []
        contract = self.contracts[account.step]
        return [contract.tasks[place] for place in places_of(account.started & ~account.finished)]

    def may_end(self, account: Account) -> list[Task]:
        """Those that may end next: where stages decide early, the first one that was handed over, and those of
        engines."""
        if not self.decides_early or not account.is_active:
            return self.running(account)
        contract = self.contracts[account.step]
        beside = account.started & ~account.finished & ~contract.compute
        return [contract.tasks[place] for place in places_of(sum(account.queue[:1]) | beside)]

    def decision(self, account: Account) -> DecideNow | None:
        """What a stage that decides early may be told so that it changes something."""
        return self._useful_decision(account) if self.is_told else None

    def _useful_decision(self, account: Account) -> DecideNow | None:
        """That the last task handed over is about to end; not twice, and not while another one is due."""
        if not account.queue or account.is_told or (account.due and not account.due & account.queue[-1]):
            return None
        return DecideNow(account.step, 0.0, self._task(account, account.queue[-1]))

    def idle_events(self, account: Account) -> list[Event]:
        """What a stage may be told without any consequence."""
        return [*self._idle_decisions(account), *self._idle_favours(account)]

    def _idle_decisions(self, account: Account) -> list[Event]:
        """Decisions that come too late, twice, or are not about the last task."""
        if not self.decides_early or not account.is_active:
            return []
        tasks = [self.contracts[account.step].tasks[place] for place in places_of(account.started)]
        useful = self._useful_decision(account)
        return [DecideNow(account.step, 0.0, t) for t in tasks if useful is None or t != useful.task]

    def _idle_favours(self, account: Account) -> list[Event]:
        """Early ticks, and announcements of what is coming, has come or does not exist, of this step and of others."""
        if not self.has_foresight or account.step < 0:
            return []
        inputs = self.packets.stimuli(self.contracts[account.step].inputs)
        nothing = Message(MessageKind.ACTIVATION, 1 << 16, 0, 0)
        messages = [*(e.message for _, e, _ in inputs if isinstance(e, InputArrived)), nothing]
        steps = range(account.step - 1, account.step + 2)
        announcements: list[Event] = [TaskAnnounced(step, 0.0, message) for step in steps for message in messages]
        if self.awaits_inputs:
            here = self.packets.stimuli(account.delivered & ~self.packets.starts)
            announcements += [InputPromised(*event[:3]) for _, event, _ in here if event[0] == account.step]
            announcements.append(InputPromised(account.step - 1, 0.0, nothing))
        return [ClockTick(account.step, 0.0), ClockTick(account.step - 1, 2.0), *announcements]

    def due_tasks(self, account: Account) -> list[Task]:
        return [self.contracts[account.step].tasks[place] for place in places_of(account.due)]

    def _task(self, account: Account, bit: int) -> Task:
        return self.contracts[account.step].tasks[bit.bit_length() - 1]

    def joins(self, step: int, task: Task) -> int:
        """What has to be under way before the task can end here: that the others have joined in it, and its inputs."""
        if self.awaits_inputs:
            contract = self.contracts[step]
            return contract.needs[contract.place[task]].packets
        contract = self.contracts[step]
        if not self.is_collective or not contract.compute >> contract.place[task] & 1:
            return 0
        return sum(self.packets.bit(self.place, Joined(step, m, task)) for m in self.members)

    def is_done(self, account: Account) -> bool:
        """Whether every step has ended."""
        return account.step == len(self.contracts) - 1 and not account.is_active

    def _finish(self, account: Account, event: TaskFinished) -> Account:
        bit = 1 << self.contracts[account.step].place[event.task]
        account = account._replace(
            finished=account.finished | bit,
            delivered=account.delivered | self.joins(event.step, event.task),
        )
        if self.decides_early:
            queue = tuple(queued for queued in account.queue if queued != bit)
            if bit & account.due:
                due = account.due & ~bit
                account = account._replace(due=due, is_told=account.is_told and due > 0)
            account = account._replace(queue=queue, firsts=account.firsts & ~bit)
            if self.counts_on and not account.due:
                account = account._replace(due=sum(queue[:1]))
        return account

    def _decide(self, account: Account, event: DecideNow) -> Account:
        if event != self.decision(account):
            return account
        before = sum(account.queue[-2:-1]) & account.firsts  # one program, which ends as a whole
        return account._replace(due=account.queue[-1] | before, is_told=True)

    def _check_alone(self, task: Task) -> None:
        partner = next((pair.second for pair in self.pairs or () if pair.first == task), None)
        contract = next((c for c in self.contracts if partner in c.place), None)
        if self.row is not None and contract is not None:
            raise Violation(f"{self.name} runs {task} without {partner}, with which its row joins it")

    def _run_pair(self, account: Account, instruction: RunPair) -> Account:
        step, (first, second) = instruction
        contract = self._active(account, instruction)
        if self.pairs is None or (self.row is not None and instruction.task not in self.pairs):
            raise Violation(f"{self.name} runs {instruction.task}, which is no pair of it")
        if "".join(sorted((first.kind, second.kind))) not in ("BF", "FI", "FW", "IW", "FF"):
            raise Violation(f"{self.name} runs {instruction.task}, whose kinds cannot join")
        account = self._run(account, RunTask(step, first))
        bit, due = 1 << contract.place[first], account.due
        account = account._replace(firsts=account.firsts | bit)
        if (first.kind, second.kind) == ("I", "W") and first[1:] == second[1:]:
            account = account._replace(due=due | bit)
        account = self._run(account, RunTask(step, second))._replace(due=due)
        # Members that launch the same tasks, but not in the same programs, diverge too.
        return account._replace(launched=(*account.launched[:-2], instruction)) if self.others else account

    def _run(self, account: Account, instruction: RunTask) -> Account:
        task, contract = instruction.task, self._active(account, instruction)
        place = contract.place.get(task)
        if place is None:
            raise Violation(f"{self.name} runs {task}, which is not a task of it")
        if account.started >> place & 1:
            raise Violation(f"{self.name} runs {task} twice")
        needs = contract.needs[place]
        if not account.has(needs) and not self._may_await(contract, account, place):
            raise Violation(f"{self.name} runs {task} before {self._lacking(contract, account, task)}")
        if contract.compute >> place & 1:
            account = self._compute(contract, account, place)
        else:
            account = self._run_beside(contract, account, place)
        self._check_memory(contract, account, task)
        bound = self.admission.read_ahead.get(task.chunk)
        if bound is not None and (untaken := len(self.admission.untaken(contract, account, task.chunk))) > bound.limit:
            raise Violation(f"{self.name} runs {task}, and {untaken} outputs of {bound.limit} have not been taken")
        if self.row is not None and contract.compute >> place & 1:
            self._check_row(contract, account, task)
        return self._launch(account, instruction) if self.others and contract.compute >> place & 1 else account

    def _may_await(self, contract: Contract, account: Account, place: int) -> bool:
        """Whether a task may be handed over before its inputs: it is the next entry, and these are promised."""
        if not self.awaits_inputs or account.missing(contract.needs[place]):
            return False
        inputs = self.packets.split(contract.needs[place].packets & ~account.delivered)
        is_promised = all(contract.promised_by.get(packet, 0) & account.delivered for packet in inputs)
        return is_promised and place == self.admission.next_entry(contract, account)

    def _compute(self, contract: Contract, account: Account, place: int) -> Account:
        """The account once a task of the stage's own lane runs."""
        account = account._replace(started=account.started | 1 << place, is_told=False, wake_s=None)
        if self.decides_early:
            account = account._replace(queue=(*account.queue, 1 << place))
            if self.counts_on and not account.due:
                account = account._replace(due=1 << place)
        capacity = 1 + (account.due > 0) + account.firsts.bit_count()
        if (account.started & ~account.finished & contract.compute).bit_count() > capacity:
            raise Violation(f"{self.name} runs {contract.tasks[place]} beside {capacity} other tasks")
        return account

    def _run_beside(self, contract: Contract, account: Account, place: int) -> Account:
        """The account once an engine runs a task."""
        lane, of_lane = next((lane, bits) for lane, bits in contract.engines.items() if bits >> place & 1)
        running = account.started & ~account.finished & of_lane
        if running:
            (other,) = places_of(running)
            raise Violation(f"{self.name} runs {contract.tasks[place]} on {lane} beside {contract.tasks[other]}")
        first = self.guidance.first_of_engine(account, self.admission.startable(contract, account, of_lane))
        if not self.others and first not in (None, place) and contract.tasks[place].microbatch >= 0:
            raise Violation(f"{self.name} runs {contract.tasks[place]} on {lane} before {contract.tasks[first]}")
        return account._replace(started=account.started | 1 << place)

    def _check_memory(self, contract: Contract, account: Account, task: Task) -> None:
        limit, window, most = self.guidance.limit, self.admission.window, self.admission.most_weight
        held = [] if window is None else sorted(self.admission.held(contract, account))
        if contract.weights and (weight := sum(contract.weights[m] for m in held)) > most:
            raise Violation(f"{self.name} runs {task} and holds microbatches {held}, {weight} of {most}")
        if not contract.weights and window is not None and len(held) > window:
            raise Violation(f"{self.name} runs {task} and holds microbatches {held}: its window is {window}")
        if limit is not None and (units := self._held_at_most(contract, account)) > limit:
            unit = self.guidance.operations.unit
            raise Violation(f"{self.name} runs {task} and holds {units / unit:g} activations of {limit / unit:g}")

    def _held_at_most(self, contract: Contract, account: Account) -> int:
        """The units that the place holds until the next end, what waits in the device's queue excepted; and behind what
        is about to end, if that is more."""
        queued = sum(account.queue[1:])
        now = self.guidance.held(contract, account._replace(started=account.started & ~queued), ended=True)
        return max(now, self.guidance.held(contract, account))

    def _launch(self, account: Account, instruction: RunTask) -> Account:
        account = account._replace(launched=(*account.launched, instruction))
        if not self.is_collective:
            return account
        joined = Joined(instruction.step, self.member, instruction.task)
        return account._replace(sent=account.sent | sum(self.packets.bit(other, joined) for other in self.others))

    def _tell(self, account: Account, instruction: TellGroup) -> Account:
        step, member, note = instruction
        what = f"{self.name} tells member {member} {note}"
        if member not in self.members:
            raise Violation(f"{what}, which is nobody")
        packet = self.packets.bit(self.members[member], GroupHeard(step, 0.0, self.member, note))
        if account.sent & packet:
            raise Violation(f"{what} twice")
        return account._replace(sent=account.sent | packet)

    def _tick(self, account: Account, event: ClockTick, instructions: list[Instruction]) -> Account:
        """One that comes early says nothing, another one is still under way."""
        if account.wake_s is None or event.step != account.step or event.time_s < account.wake_s:
            return account
        compute, place = self.contracts[account.step].compute, self.contracts[account.step].place
        if not any(compute >> place.get(task, 0) & 1 for i in instructions for task in tasks_of(i)):
            raise Violation(f"{self.name} goes on holding after the tick that it asked for")
        return account._replace(wake_s=None)

    def _end_vain_hold(self, account: Account) -> Account:
        """A hold ends where an engine has taken the memory for what was held; its tick comes in vain."""
        if account.wake_s is None or not account.is_active or self.others:
            return account
        contract = self.contracts[account.step]
        if self.admission.ready_task(contract, account, contract.compute) is not None:
            return account
        return account._replace(wake_s=None)

    def _ask_for_tick(self, account: Account, instruction: WakeAt) -> Account:
        contract = self._active(account, instruction)
        task = (
            self.admission.ready_task(contract, account, contract.compute)
            if account.is_free(contract.compute)
            else None
        )
        if self.guidance.rules is None or task is None or not self.admission.may_hold(contract, account):
            raise Violation(f"{self.name} asks for a tick and has nothing to hold")
        return account._replace(wake_s=instruction.time_s)

    def _check_row(self, contract: Contract, account: Account, task: Task) -> None:
        assert self.row is not None
        if task.microbatch < 0:
            return
        row = [t for t in self.row if t in contract.place and contract.compute >> contract.place[t] & 1]
        position = sum(account.started >> contract.place[entry] & 1 for entry in row) - 1
        expected = row[position]
        if task != expected:
            raise Violation(f"{self.name} runs {task}, but entry {position} of its strict row is {expected}")

    def _send(self, account: Account, instruction: Send) -> Account:
        contract = self._active(account, instruction)
        promise = contract.sends.get((instruction.message, instruction.stage))
        what = f"{self.name} sends {instruction.message} to stage {instruction.stage}"
        if promise is None:
            raise Violation(f"{what}, which waits for no such message")
        if account.sent & promise.sent:
            raise Violation(f"{what} twice")
        if promise.tasks & ~account.finished or promise.packets & ~account.delivered:
            raise Violation(f"{what} before it is complete")
        return account._replace(sent=account.sent | promise.sent)

    def _finish_step(self, account: Account, instruction: FinishStep) -> Account:
        contract = self._active(account, instruction)
        left = [contract.tasks[place] for place in places_of((1 << len(contract.tasks)) - 1 & ~account.finished)]
        if left:
            raise Violation(f"{self.name} ends step {account.step} without {', '.join(map(str, left))}")
        unsent = [str(message) for (message, _), promise in contract.sends.items() if not promise.sent & account.sent]
        if unsent:
            raise Violation(f"{self.name} ends step {account.step} without having sent {', '.join(unsent)}")
        if contract.inputs & ~account.delivered:
            raise Violation(f"{self.name} ends step {account.step} although inputs of it are missing")
        return account._replace(is_active=False)

    def _active(self, account: Account, instruction: Instruction) -> Contract:
        if not account.is_active or instruction.step != account.step:
            state = f"in step {account.step}" if account.is_active else "between steps"
            raise Violation(f"{self.name} is {state} and answers {instruction}")
        return self.contracts[account.step]

    def _lacking(self, contract: Contract, account: Account, task: Task) -> str:
        needs = contract.needs[contract.place[task]]
        tasks = [str(contract.tasks[place]) for place in places_of(account.missing(needs))]
        missing = [event for _, event, _ in self.packets.stimuli(needs.packets & ~account.delivered)]
        return ", ".join([*tasks, *(str(event.message) for event in missing if isinstance(event, InputArrived))])

    def _check_idling(self, account: Account) -> None:
        if not account.is_active:
            return
        contract = self.contracts[account.step]
        for lane, of_lane in contract.engines.items():
            is_free = account.is_free(of_lane)  # none of these is ever about to end
            task = self.admission.ready_task(contract, account, of_lane) if is_free else None
            if task is not None:
                raise Violation(f"{self.name} leaves {lane} idle although {task} is ready and admissible")
        waits_for_end = self.counts_on and not account.is_told  # and hands over what is certain only
        is_free = not account.queue if waits_for_end else account.is_free(contract.compute)
        if self.row is None and is_free:
            self._check_waiting(contract, account)

    def _check_waiting(self, contract: Contract, account: Account) -> None:
        """A stage that computes nothing has nothing to compute, or holds."""
        task = self.admission.ready_task(contract, account, contract.compute)
        if task is None:
            return
        if self.guidance.rules is None or not self.admission.may_hold(contract, account):
            raise Violation(f"{self.name} idles although {task} is ready and admissible")
        if account.wake_s is None:
            raise Violation(f"{self.name} holds {task} and has not asked to be woken")


def tasks_of(instruction: Instruction) -> tuple[Task, ...]:
    """The tasks that an instruction starts."""
    if isinstance(instruction, RunPair):
        return instruction.task
    return (instruction.task,) if isinstance(instruction, RunTask) else ()


def stuck(setting: Setting, unfinished: Iterable[int]) -> str:
    """What to say of places that can do nothing any more and have not ended every step."""
    if not setting.groups:
        return f"deadlock: stages {list(unfinished)} have work left, and nothing runs or can start"
    names = ", ".join(setting.name(place) for place in unfinished)
    return f"deadlock: {names} have work left, and nothing can end or start"


def diverging(launched: Sequence[Sequence[RunInstruction]], stage: int) -> str | None:
    """Where the sequences that a group's members have launched differ, if they do."""
    for number, tasks in enumerate(zip_longest(*launched)):
        distinct = {task for task in tasks if task is not None}
        if len(distinct) > 1:
            told = ", ".join(f"{run.task} on member {m}" for m, run in enumerate(tasks) if run is not None)
            return f"the members of stage {stage} diverge: task {number} is {told}"
    return None
