"""Several processes that tokenise pieces, or this one alone; none outlives the one that asked for them."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.context import SpawnContext

from rrfp_jax.data.tokenizing.pieces import Piece
from rrfp_jax.data.tokenizing.tokenizer import threads_of_tokenizers
from rrfp_jax.data.tokenizing.worker import Task, Worker
from rrfp_jax.pools import end_with_parent, spawning

_AHEAD = 3
"""Pieces that wait for each process, so that none waits for its next."""


class WorkerLost(RuntimeError):
    """A process has ended before its piece; the message says what to do."""


def tokenize_pieces(task: Task, pieces: Sequence[Piece], num_workers: int, told: Callable[[int], None]) -> None:
    """Make the files of all pieces; ``told`` hears of so many more bytes of text that are done.

    Raises BrokenData for what is no text, and WorkerLost; what was done by then is kept.
    """
    num_workers = min(num_workers, len(pieces))
    sizes = _alone(task, pieces) if num_workers <= 1 else _together(task, pieces, num_workers)
    for num_bytes in sizes:
        told(num_bytes)


def _alone(task: Task, pieces: Sequence[Piece]) -> Iterator[int]:
    """Without threads of the tokenizer's: they would warn of every later fork of this process."""
    with threads_of_tokenizers(False):
        worker = Worker(task)
        for piece in pieces:
            worker.do(piece)
            yield piece.num_bytes


def _together(task: Task, pieces: Sequence[Piece], num_workers: int) -> Iterator[int]:
    with spawning() as context:
        yield from _in_pool(context, task, pieces, num_workers)


def _in_pool(context: SpawnContext, task: Task, pieces: Sequence[Piece], num_workers: int) -> Iterator[int]:
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin, initargs=(task,))
    is_whole = False
    try:
        coming = iter(pieces)
        sizes: dict[Future[int], int] = {}
        while True:
            for piece in islice(coming, num_workers * _AHEAD - len(sizes)):
                sizes[pool.submit(_do, piece)] = piece.num_bytes
            if not sizes:
                break
            for future in wait(sizes, return_when=FIRST_COMPLETED).done:
                future.result()
                yield sizes.pop(future)
        is_whole = True
    except BrokenProcessPool as broken:
        raise WorkerLost(
            "a process that tokenised was killed, perhaps for want of memory, or could not start: give fewer --workers "
            "and start again, for what is done is kept; a program of one's own calls tokenize() under "
            'if __name__ == "__main__"'
        ) from broken
    finally:
        pool.shutdown(wait=is_whole, cancel_futures=True)


_worker: Worker | None = None


def _begin(task: Task) -> None:
    """In a new process."""
    global _worker  # noqa: PLW0603 - a process of the pool has no other place
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(task)


def _do(piece: Piece) -> int:
    assert _worker is not None
    return _worker.do(piece)
