"""The end of a step in a stage's plan: sums of gradients, what the stages agree on, updates."""

from itertools import pairwise

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.plan import Agreement
from rrfp_jax.core.plan_tables import PlanTables
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.tree import children, parent


class StepEnd(PlanTables):
    """What comes after a chunk's last backward: R, reports and the verdict, U."""

    def _wire_reduction(self, chunk: int) -> None:
        """R of a chunk: after the gradients of all that share its parameters."""
        reduction = self.index[Task(TaskKind.R, chunk)]
        own, copies = self._sharers(chunk)
        stage_of = self.placement.stage_of_chunk
        complete = [node for c in own if stage_of[c] == self.stage for node in self._accumulations(c)]
        remote = [c for c in own if stage_of[c] != self.stage]
        if remote:
            gate = self._gate(f"gradients of chunk {chunk} complete")
            self._after(gate, *self._accumulations(chunk))
            for c in remote:
                self._tell_sharer(gate, chunk, c)
        waiting = reduction if len(copies) == 1 else self._wire_replicas(chunk, copies, reduction)
        self._after(waiting, *complete)
        for c in remote:
            self._after_message(waiting, Message(MessageKind.SHARED, c, chunk))

    def _wire_replicas(self, chunk: int, copies: list[int], reduction: int) -> int:
        """R of a chunk waits for all replicas, which tell each other along a tree; returns what waits for this one."""
        place, degree, shared = copies.index(chunk), self.rules.tree_degree, MessageKind.SHARED
        above, below = parent(place, degree), children(place, len(copies), degree)
        here = self._gate(f"chunk {chunk} complete here and in the replicas below")
        everywhere = self._gate(f"chunk {chunk} complete in all replicas")
        for child in below:
            self._after_message(here, Message(shared, copies[child], chunk))
            self._tell_sharer(everywhere, chunk, copies[child])
        if above is None:
            self._after(everywhere, here)
        else:
            self._tell_sharer(here, chunk, copies[above])
            self._after_message(everywhere, Message(shared, copies[above], chunk))
        self._after(reduction, everywhere)
        return here

    def _tell_sharer(self, gate: int, chunk: int, other: int) -> None:
        self.sends[gate].append((Message(MessageKind.SHARED, chunk, other), self.placement.stage_of_chunk[other]))

    def _sharers(self, chunk: int) -> tuple[list[int], list[int]]:
        """Who trains the chunk's parameters: the chunks of its own replica, and its copies in all replicas."""
        graph = self.graph
        trained = [c for c in graph.sharing(chunk) if graph.trains(c)]
        if not graph.owned:
            return trained, [chunk]
        by_replica: dict[tuple[int, int], list[int]] = {}
        for c in trained:
            by_replica.setdefault(graph.owned[c], []).append(c)
        own = by_replica[graph.owned[chunk]]
        place = own.index(chunk)
        return own, [others[place] for others in by_replica.values()]

    def _wire_agreement(self) -> None:
        """U after R and, where the stages agree on something, after the verdict."""
        updates = [self.index[Task(TaskKind.U, c)] for c in self.trained]
        for chunk, update in zip(self.trained, updates, strict=True):
            self._after(update, self.index[Task(TaskKind.R, self.trained[0] if self.rules.lockstep else chunk)])
        if self.rules.lockstep:
            for earlier, later in pairwise(updates):
                self._after(later, earlier)
        if self.rules.agreement is not Agreement.NONE:
            verdict = self._wire_tree()
            for update in updates:
                self._after(update, verdict)

    def _wire_tree(self) -> int:
        """Reports up the tree of stages, the verdict down; returns the gate of the verdict."""
        stage, degree = self.stage, self.rules.tree_degree
        above, below = parent(stage, degree), children(stage, self.placement.num_stages, degree)
        verdict, report = self._gate("verdict"), self._gate("report")
        self._after(report, *self._reported())
        for child in below:
            self._after_message(report, Message(MessageKind.REPORT, child, stage))
        if above is None:
            self._after(verdict, report)
        else:
            self.sends[report].append((Message(MessageKind.REPORT, stage, above), above))
            self._after_message(verdict, Message(MessageKind.VERDICT, above, stage))
        self.sends[verdict] += [(Message(MessageKind.VERDICT, stage, child), child) for child in below]
        return verdict

    def _reported(self) -> list[int]:
        if self.rules.agreement is Agreement.ALL:
            return list(range(self.num_microbatch_tasks + len(self.trained)))  # all but U, and what may wait for it
        sinks = (c for c in self.chunks if not self.graph.successors(c))
        return [node for chunk in sinks for node in self._nodes(TaskKind.F, chunk).values()]
