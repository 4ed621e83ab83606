"""Two ranks in one process, one of them slow or failing in any phase: they come to the same end, again and again."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest

from rrfp_jax.checkpoint import Checkpoints, Coordinator, NotDone, Owner
from rrfp_jax.checkpoint import _checkpoints as module
from rrfp_jax.checkpoint._checkpoints import one_line
from rrfp_jax.checkpoint._records import is_committed
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.tree_collectives import PeerFailed
from tests.checkpoint.states import Pieces, bits, pieces_of, trained
from tests.cluster.mesh import networks

PIECES = pieces_of([["layers.0"], ["head"]], optax.sgd(1e-3, momentum=0.9))
"""Of two ranks, a chunk each."""
OWNERS = {name: Owner(ranks=(rank,), device=jax.devices()[rank]) for rank, name in enumerate(["layers.0", "head"])}
PATIENCE_S = 20.0


class Meetings:
    """Brings ranks together that are threads of this process."""

    def __init__(self) -> None:
        self._brought: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self.names: dict[int, list[str]] = {0: [], 1: []}
        self.deaf: tuple[int, str] | None = None
        """A rank that hears nothing in gatherings of this phase, as if another were lost."""
        self.dies: tuple[int, str] | None = None
        """A rank that is lost when it comes to a gathering of this phase, and without which the other goes on."""
        self._living = {0, 1}

    def gather(self, rank: int, name: str, data: Any) -> Mapping[int, Any]:
        self.names[rank].append(name)
        with self._changed:
            brought = self._brought.setdefault(name, {})
            assert rank not in brought, f"{name} is not new"
            if self.dies is not None and self.dies[0] == rank and name.endswith(self.dies[1]):
                self._living.discard(rank)
            else:
                brought[rank] = data
            self._changed.notify_all()
            if rank not in self._living:
                raise ConnectionError("this rank is lost")
            assert self._changed.wait_for(lambda: brought.keys() >= self._living, PATIENCE_S), f"{rank} alone in {name}"
        if self.deaf is not None and self.deaf[0] == rank and name.endswith(self.deaf[1]):
            raise ConnectionError("the other rank was lost")
        return dict(brought)


class Rank:
    """One rank's coordinator, which may take its time."""

    def __init__(self, rank: int, meetings: Meetings, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.rank, self._meetings, self._delay_s = rank, meetings, delay_s
        self.living = (0, 1)

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:
        time.sleep(self._delay_s())
        return self._meetings.gather(self.rank, name, data)


class Ranks:
    """The checkpoints of two ranks; every call is made by both at once."""

    def __init__(self, directory: Path, coordinators: list[Coordinator], **options: Any) -> None:
        self._pool = ThreadPoolExecutor(2)
        self.members: list[Checkpoints] = self.both(
            lambda rank: Checkpoints(directory, OWNERS, coordinator=coordinators[rank], **options)
        )

    def both(self, call: Callable[[int], Any]) -> list[Any]:
        futures = [self._pool.submit(call, rank) for rank in (0, 1)]
        return [future.result(PATIENCE_S) for future in futures]

    def save(self, step: int) -> list[str | None]:
        """Why the step was not committed, as each rank says."""
        pieces = trained(PIECES, step)

        def one(rank: int) -> str | None:
            self.members[rank].save(step, [pieces[rank]], {"step": step})
            saved = self.members[rank].wait()
            assert saved is not None
            return saved.failure

        return self.both(one)

    def newest(self) -> list[int | None]:
        founds = self.both(lambda rank: self.members[rank].newest())
        return [None if found is None else found.step for found in founds]

    def restored(self) -> Pieces:
        def one(rank: int) -> Any:
            found = self.members[rank].newest()
            assert found is not None
            (state,) = self.members[rank].restore(found, [PIECES[rank]])
            return PIECES[rank][0], state

        return self.both(one)


@pytest.fixture
def meetings() -> Meetings:
    return Meetings()


@pytest.fixture
def ranks(tmp_path: Path, meetings: Meetings) -> Ranks:
    return Ranks(tmp_path, [Rank(0, meetings), Rank(1, meetings)])


@pytest.fixture
def peers() -> Iterator[list[Peers]]:
    """Two ranks, connected by a real network within this process."""
    layout = Layout(num_stages=2, num_ranks=2)
    with networks(2) as made:
        yield [Peers(network, layout) for network in made]


def test_a_rank_that_writes_slowly_is_waited_for(
    tmp_path: Path, peers: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For hours, on the clock by which ranks wait."""
    fast = SimpleNamespace(monotonic=lambda: 15_000 * time.monotonic())
    monkeypatch.setattr("rrfp_jax.waiting.time", fast)
    ranks = Ranks(tmp_path, list(peers))
    write = ranks.members[1]._writer.write

    def slowly(*args: Any) -> None:
        time.sleep(1.5)
        write(*args)

    ranks.members[1]._writer.write = slowly  # type: ignore[method-assign]
    assert ranks.save(1) == [None, None]
    ranks.members[1]._writer.write = write  # type: ignore[method-assign]
    for step in (2, 3):
        assert ranks.save(step) == [None, None]
    assert ranks.newest() == [3, 3]
    assert bits(ranks.restored()) == bits(trained(PIECES, 3))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_unequal_speed_in_every_gathering(tmp_path: Path, meetings: Meetings, seed: int) -> None:
    chance = random.Random(seed)
    slow = [Rank(rank, meetings, lambda: chance.choice([0.0, 0.0, 0.1])) for rank in (0, 1)]
    ranks = Ranks(tmp_path, slow)
    for step in (1, 2):
        assert ranks.save(step) == [None, None]
    (tmp_path / "step_00000002" / "commit.json").write_text("[")
    assert ranks.newest() == [1, 1]
    assert bits(ranks.restored()) == bits(trained(PIECES, 1))
    assert meetings.names[0] == meetings.names[1]
    kinds = {name.split()[1] for name in meetings.names[0]}
    assert kinds == {"leftovers", "save", "newest", "restore"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["copy", "write", "finish", "commit"])
def test_an_error_of_one_rank_is_told_by_both_and_the_next_saves_commit(
    ranks: Ranks, phase: str, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert ranks.save(1) == [None, None]
    member = ranks.members[rank]

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    if phase == "commit":
        ranks.members[0]._before_commit = fail
    else:
        owner, name = (member, "_copy") if phase == "copy" else (member._writer, phase)
        setattr(owner, name, fail)
    pieces = trained(PIECES, 2)

    def one(each: int) -> str | None:
        try:
            ranks.members[each].save(2, [pieces[each]], {})
        except OSError:
            assert (phase, each) == ("copy", rank)
        saved = ranks.members[each].wait()
        assert saved is not None
        assert saved.step == 2
        return saved.failure

    who = 0 if phase == "commit" else rank
    sentences = set(ranks.both(one))
    assert sentences == {f"rank {who}: No space left on device"}
    if phase == "commit":
        ranks.members[0]._before_commit = lambda: None
    else:
        delattr(owner, name)
    for step in (3, 4):
        assert ranks.save(step) == [None, None]
    assert ranks.newest() == [4, 4]
    assert [entry.name for entry in sorted(member.directory.iterdir())] == [f"step_0000000{n}" for n in (1, 3, 4)]


def test_what_is_not_heard_of_a_commit_stands_in_its_record(ranks: Ranks, meetings: Meetings) -> None:
    assert ranks.save(1) == [None, None]
    meetings.deaf = (1, "committed")
    assert ranks.save(2) == [None, None]
    meetings.deaf = (1, "written")
    failure = ranks.both(lambda rank: _save_alone(ranks, rank, 3) if rank else None)[1]
    assert failure == "the other rank was lost"


def _save_alone(ranks: Ranks, rank: int, step: int) -> str | None:
    """With a coordinator whose other rank comes to every gathering, and brings nothing."""
    member, names = ranks.members[rank], ("start", "written")
    coordinator = member._coordinator
    for name in names:
        number = member._num_calls["save"] + 1
        meetings = coordinator._meetings  # type: ignore[attr-defined]
        meetings._brought[f"checkpoint save {number} {name}"] = {0: ["data-00", None, [0, 1]]}
    member.save(step, [trained(PIECES, step)[rank]], {})
    saved = member.wait()
    assert saved is not None
    return saved.failure


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("phase", ["start", "written", "finished", "committed"])
def test_a_loss_spoils_a_save_and_the_rest_save_again(
    ranks: Ranks, meetings: Meetings, tmp_path: Path, phase: str, lost: int
) -> None:
    assert ranks.save(1) == [None, None]
    meetings.dies = lost, phase
    left, pieces = 1 - lost, trained(PIECES, 2)
    assert ranks.save(2)[left] == f"rank {lost} was lost meanwhile"
    member = ranks.members[left]
    assert member.has_met_loss
    owners = {name: Owner(ranks=(left,), device=owner.device) for name, owner in OWNERS.items()}
    member.follow((left,), owners)
    member.save(2, pieces, {"step": 2})
    saved = member.wait()
    assert saved is not None
    assert (saved.failure, saved.met_loss) == (None, False)
    # Another run reads all of it.
    after = Checkpoints(tmp_path, {name: Owner(ranks=(0,), device=owner.device) for name, owner in OWNERS.items()})
    found = after.newest()
    assert found is not None
    assert found.step == 2
    assert bits(list(zip([layers for layers, _ in PIECES], after.restore(found, PIECES), strict=True))) == bits(pieces)


def test_ranks_that_share_out_unequally_save_nothing(ranks: Ranks, meetings: Meetings) -> None:
    """One of them has heard of a loss before the call, the other one has not."""
    meetings._living = {0}
    ranks.members[0].follow((0,), {name: Owner(ranks=(0,), device=owner.device) for name, owner in OWNERS.items()})
    pieces = trained(PIECES, 1)
    ranks.members[0].living = (0, 1)
    ranks.members[0].save(1, pieces, {})
    saved = ranks.members[0].wait()
    assert saved is not None
    assert saved.met_loss
    assert is_committed(ranks.members[0].directory, 1) is False


def test_a_commit_that_stands_counts_although_the_disk_then_failed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = module.Commit.write

    def write_and_fail(self: Any, directory: Path) -> None:
        write(self, directory)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.Commit, "write", write_and_fail)
    assert ranks.save(1) == [None, None]
    assert is_committed(tmp_path, 1)
    assert ranks.newest() == [1, 1]


def test_an_error_with_leftovers_reaches_the_others(
    tmp_path: Path, meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(module, "remove_leftovers", fail)
    made = Ranks.__new__(Ranks)
    made._pool = ThreadPoolExecutor(2)

    def one(rank: int) -> str:
        with pytest.raises(NotDone) as refusal:
            Checkpoints(tmp_path, OWNERS, coordinator=Rank(rank, meetings))
        return str(refusal.value)

    assert made.both(one) == [f"rank 0: Permission denied: {tmp_path}"] * 2


def test_a_model_that_one_rank_cannot_restore_is_refused_by_all(ranks: Ranks) -> None:
    assert ranks.save(1) == [None, None]
    other = pieces_of([["layers.0"], ["layers.1"]], optax.sgd(1e-3, momentum=0.9))

    def one(rank: int) -> str:
        found = ranks.members[rank].find(1)
        with pytest.raises(ValueError, match=r"has no layer layers\.1: resume with the model") as refusal:
            ranks.members[rank].restore(found, [other[rank]])
        return str(refusal.value)

    first, second = ranks.both(one)
    assert first == second


def test_a_shared_optimizer_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from rrfp_jax.checkpoint import _reader
    from tests.checkpoint.states import opened, restored, save

    ((layers, state),) = pieces_of([["layers.0", "head"]], optax.adam(1e-3))
    checkpoints = opened(tmp_path, [(layers, state)])
    assert save(checkpoints, 1, [(layers, state)]) is None
    names: list[Any] = []
    read = _reader._read_batch

    def counting(path: Path, specs: Any) -> Any:
        names.extend(specs)
        return read(path, specs)

    monkeypatch.setattr(_reader, "_read_batch", counting)
    replicas = [(layers, state), (layers, replace(state, params=dict(state.params)))]
    first, second = restored(checkpoints, replicas)
    of_optimizer = [name for name in names if name[1] == "optimizer"]
    assert len(of_optimizer) == len(set(of_optimizer)) > 0
    assert len(names) == len(set(names)) + sum(name[1] == "params" for name in set(names))
    assert bits([first]) == bits([second]) == bits(trained([(layers, state)], 1))
    assert first[1].params["head"]["table"] is not second[1].params["head"]["table"]
    checkpoints.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PeerFailed("rank 1 was lost"), "rank 1 was lost"),
        (RuntimeError("the disk is gone\nand more"), "the disk is gone"),
        (OSError(28, "No space left on device", "runs/a"), "No space left on device: runs/a"),
        (KeyError("layers.3"), "KeyError: 'layers.3'"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_is_told_without_the_names_of_classes(error: Exception, told: str) -> None:
    assert one_line(error) == told
