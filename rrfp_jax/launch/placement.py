"""Which part of a run a launcher has: what its options give, and for the rest what a scheduler's variables say."""

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp_jax.launch.settings import Address
from rrfp_jax.launch.surroundings import read_surroundings
from rrfp_jax.launch.variables import Surroundings


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A launcher's place among those of a run, as far as it is known: None is what nobody has said."""

    num_nodes: int | None = None
    node_rank: int | None = None
    head: Address | None = None
    num_processes: int | None = None
    """On each node."""

    def completed(self, environ: Mapping[str, str]) -> "tuple[Placement, str]":
        """The same with what is missing taken from the environment, and a line that says what came from where.

        Raises ValueError where nothing is found, or not enough.
        """
        found = read_surroundings(environ)
        full = Placement(
            num_nodes=found.num_nodes if self.num_nodes is None else self.num_nodes,
            node_rank=found.node_rank if self.node_rank is None else self.node_rank,
            head=_head(found) if self.head is None else self.head,
            num_processes=found.num_processes if self.num_processes is None else self.num_processes,
        )
        full._check(found)
        if full.num_nodes == 1 and self.head is None:
            full = Placement(num_nodes=1, node_rank=full.node_rank, num_processes=full.num_processes)
        return full, f"{full._shown()}; from {found.scheduler} ({', '.join(found.variables)}){self._given()}"

    def _check(self, found: Surroundings) -> None:
        needed: dict[str, object] = {
            "--nodes": self.num_nodes,
            "--node-rank": self.node_rank,
            "--processes": self.num_processes,
        }
        if self.num_nodes != 1:
            needed["--head"] = self.head
        if missing := [option for option, value in needed.items() if value is None]:
            read = " and ".join(found.variables)
            raise ValueError(f"{found.scheduler} ({read}) does not say all that is needed: give {', '.join(missing)}")

    def _shown(self) -> str:
        where = "" if self.head is None else f", head {self.head}"
        return f"node {self.node_rank} of {self.num_nodes}{where}, processes on each: {self.num_processes}"

    def _given(self) -> str:
        options = {
            "--nodes": self.num_nodes,
            "--node-rank": self.node_rank,
            "--head": self.head,
            "--processes": self.num_processes,
        }
        given = [option for option, value in options.items() if value is not None]
        return f"; as given: {', '.join(given)}" if given else ""


def _head(found: Surroundings) -> Address | None:
    return None if found.head_host is None else Address(host=found.head_host, port=found.head_port)
