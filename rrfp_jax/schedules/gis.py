"""GIS, the interleaved schedule with less memory (Wan et al., PipeOffload, arXiv 2503.01328, section 3).

As in interleaved 1F1B, groups of g microbatches go through the stage's v chunks in turn, and back through them in
reverse. Two things make it hold less. The backward is split, and each W follows its I: the gradient of a microbatch
comes back one I per stage, so that stage s needs g(v-1) + p-s forwards in its warm-up instead of
(v-1)p + 2(p-1-s). And the groups may be smaller than p, for which the paper has the name GIS-H at p/2.

Which g are possible? A microbatch comes round to the stage's next chunk after p forwards, one per stage; meanwhile the
warm-up has g of them to run, and waits for p-g, at each of the v-1 changes of chunk. So g > p gains nothing. Later, F,
I and W alternate. Let I(k) be the k-th I of a stage, counted over its chunks. On the last stage I(k) waits for I(k-g)
of stage 0, one chunk later in the model, which stands there behind the F that follows I(k-g-1). That one waits, unless
it is of the first chunk, for the last stage's F of g passes earlier, which stands right behind I(k-(2g+2-p)) there. The
way back to I(k) is 2F + 2I + W long, and must fit into 2g+2-p rounds of F + I + W: two are enough, one is not, and with
none the stages wait for each other in a circle (unless all those F are of the first chunk, as those of two chunks with
g = 1 are). Hence g >= p/2.
"""

from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, looped

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters


@schedule(
    "gis",
    placement="looped: chunk c on stage c mod p",
    source="GIS and GIS-H of PipeOffload, arXiv 2503.01328, section 3",
    split_backward=True,
    chunks_per_stage=2,
    fixed_chunks=False,
    has_groups=True,
    constraints="at least 2 chunks per stage; a group_size from p/2 to p that divides num_microbatches",
)
def gis(request: ScheduleRequest) -> ScheduleTable:
    """Groups of g microbatches: smaller ones hold less, and wait longer in the warm-up; by default the smallest.

    Stage s runs g(v-1) + p-s warm-up forwards; then I, W and F in turn while forwards are left, then I and W. Raises
    ValueError for one chunk per stage, and for groups that :func:`gis_group_size` refuses.
    """
    p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage("gis", request)
    if v == 1:
        raise ValueError("gis with 1 chunk per stage has nothing to interleave: take 1f1b-split, or chunks_per_stage=2")
    size = gis_group_size(request)
    return ScheduleTable.from_orders("gis", looped(p, v), chain(p * v, m, split=True), gis_orders(p, m, v, size))


def gis_orders(num_stages: int, num_microbatches: int, num_chunks: int, group_size: int) -> list[list[Task]]:
    """The rows for any size of groups that divides the number of microbatches, even if they deadlock.

    ``num_chunks`` are those of a stage.
    """
    p, m, v, size = num_stages, num_microbatches, num_chunks, group_size
    passes = [(first + i, loop) for first in range(0, m, size) for loop in range(v) for i in range(size)]
    orders = []
    for stage in range(p):
        forwards = [Task(F, stage + p * loop, i) for i, loop in passes]
        num_warmup = size * (v - 1) + p - stage
        order, rest = forwards[:num_warmup], forwards[num_warmup:]
        for k, (i, loop) in enumerate(passes):
            chunk = stage + p * (v - 1 - loop)
            order += [Task(I, chunk, i), Task(W, chunk, i), *rest[k : k + 1]]
        orders.append(order)
    return orders


def gis_group_size(request: ScheduleRequest) -> int:
    """The size asked for, or the smallest possible: from p/2 to p, and a divisor of the number of microbatches.

    Raises ValueError if that asked for is none of these, or if there is none.
    """
    p, m = request.num_stages, request.num_microbatches
    least = -(-p // 2)
    possible = [size for size in range(least, p + 1) if m % size == 0]
    if not possible:
        near = max(least, round(m / least) * least)
        raise ValueError(
            f"gis runs groups of {least} to {p} microbatches on {p} stages, but num_microbatches ({m}) is no multiple "
            f"of any of these: use {near} instead of {m}"
        )
    size = possible[0] if request.group_size is None else request.group_size
    if size not in possible:
        raise ValueError(
            f"gis on {p} stages with {m} microbatches cannot have groups of {size}: a group_size from {least} to {p} "
            f"that divides {m} is {' or '.join(map(str, possible))}"
        )
    return size
