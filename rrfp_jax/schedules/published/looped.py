"""Schedules on the looped placement: breadth-first, interleaved 1F1B, the same with a split backward, and GIS.

All cut the model into v chunks per stage, chunk c on stage c mod p, which divides the fill and drain by v.

**Interleaved 1F1B with a split backward, within the memory of the whole one.** A stage may hold as many chunk passes,
each from the start of its F to the end of its W, as the fused table makes it hold. Splitting pays all the same, because
I hands the gradient on without waiting for W. The plain way is to keep the order and to run each W right behind its I.
But with several chunks a gradient often arrives while the row wants something else, so W may *wait* for the places
where the stage would idle. Where those are depends on the lengths of the tasks and on the time between stages; the
order is made by a rule that runs with those of the request. A free stage starts

1. the first task in its row of the fused table (I in the place of B) among its next F, if memory suffices for it, and
   every I whose gradient is there;
2. else its oldest W that has not run; else nothing.

It cannot get stuck. Take any order in which the fused table can run, and the first F or I in it that has not run. Its
inputs are there, and all that precedes it in its row has run; so it is the row's next F, or an I that may start. If it
is an F without room, the stage holds more passes than in the fused table at that place, although at least as many I
have run as there B: so a W is left to be run. Of the plain way and this one the quicker is taken. So the result is
never slower than the fused table. As a hint F and I rank as in the fused table, and W behind them where memory has room
for more.

**GIS** (Wan et al., PipeOffload, arXiv 2503.01328, section 3): as in interleaved 1F1B, groups of g microbatches go
through the stage's v chunks in turn, and back through them in reverse. Two things make it hold less. The backward is
split, and each W follows its I: the gradient of a microbatch comes back one I per stage, so that stage s needs
g(v-1) + p-s forwards in its warm-up instead of (v-1)p + 2(p-1-s). And the groups may be smaller than p, for which the
paper has the name GIS-H at p/2.

Which g are possible? A microbatch comes round to the stage's next chunk after p forwards, one per stage; meanwhile the
warm-up has g of them to run, and waits for p-g, at each of the v-1 changes of chunk. So g > p gains nothing. Later, F,
I and W alternate. Let I(k) be the k-th I of a stage, counted over its chunks. On the last stage I(k) waits for I(k-g)
of stage 0, one chunk later in the model, which stands there behind the F that follows I(k-g-1). That one waits, unless
it is of the first chunk, for the last stage's F of g passes earlier, which stands right behind I(k-(2g+2-p)) there. The
way back to I(k) is 2F + 2I + W long, and must fit into 2g+2-p rounds of F + I + W: two are enough, one is not, and with
none the stages wait for each other in a circle (unless all those F are of the first chunk, as those of two chunks with
g = 1 are). Hence g >= p/2.
"""

from rrfp_jax.schedules.language import B, Described, F, I, Stage, TaskOrder, W, like, quickest, rounds, rule
from rrfp_jax.schedules.language._streams import Stream
from rrfp_jax.schedules.registry import schedule
from rrfp_jax.schedules.request import LOOPED


@schedule("breadth-first", shape=LOOPED, source="Breadth-First Pipeline Parallelism, arXiv 2211.05953")
def breadth_first(s: Stage) -> TaskOrder:  # noqa: ARG001 - all stages alike
    """All microbatches through a chunk before the next chunk of the stage, backwards in reverse (Lamy-Poirier)."""
    return F.rest + B.rest


def _in_groups(s: Stage, size: int, stream: Stream) -> Stream:
    """Returns the stream in groups of microbatches, which visit the stage's chunks in turn, backwards in reverse."""
    chunks = s.chunks if stream is F else s.chunks[::-1]
    return stream.over((c, first + i) for first in range(0, s.m, size) for c in chunks for i in range(size))


@schedule(
    "interleaved-1f1b",
    shape=LOOPED,
    source="Megatron-LM, arXiv 2104.04473",
    constraints="at least 2 chunks per stage; num_microbatches divisible by num_stages",
)
def interleaved_one_f_one_b(s: Stage, backward: Stream = B) -> TaskOrder:
    """Megatron-LM's order (Narayanan et al., SC'21, section 2.2).

    Microbatches go in groups of p through the stage's chunks in turn, backwards through them in reverse; stage s runs
    2(p-1-s) + (v-1)p warm-up forwards. Raises ValueError unless p divides the number of microbatches and v > 1.
    """
    _check_interleaved(s)
    warm_up = 2 * (s.p - 1 - s.i) + (len(s.chunks) - 1) * s.p
    return rounds(_in_groups(s, s.p, F).ahead(warm_up), _in_groups(s, s.p, backward))


@schedule(
    "interleaved-1f1b-split",
    shape=LOOPED,
    source="our construction: interleaved 1F1B, split as in Zero Bubble, arXiv 2401.10241",
    split_backward=True,
    weights_fill=True,
    from_times=True,
    constraints="as interleaved-1f1b; give the profiled durations_ms and comm_ms",
)
def interleaved_one_f_one_b_split(s: Stage) -> Described:
    """Interleaved 1F1B's memory on every stage, W deferred where that is quicker by the profiled times."""
    plain, row = interleaved_one_f_one_b(s), interleaved_one_f_one_b(s, I)
    deferred = rule(like(row, s), W).frozen(lengths=s.lengths, hop=s.asked.comm_ms, holding=plain.peak(s))
    return quickest(plain, deferred)


@schedule(
    "gis",
    shape=LOOPED,
    source="GIS and GIS-H of PipeOffload, arXiv 2503.01328, section 3",
    split_backward=True,
    has_groups=True,
    constraints="at least 2 chunks per stage; a group_size from p/2 to p that divides num_microbatches",
)
def gis(s: Stage) -> TaskOrder:
    """Groups of g microbatches: smaller ones hold less, and wait longer in the warm-up; by default the smallest.

    Raises ValueError for one chunk per stage, and for groups that :func:`gis_group_size` refuses.
    """
    if len(s.chunks) == 1:
        raise ValueError("gis with 1 chunk per stage has nothing to interleave: take 1f1b-split, or chunks_per_stage=2")
    return gis_order(s, gis_group_size(s.p, s.m, s.asked.group_size))


def gis_order(s: Stage, size: int) -> TaskOrder:
    """g(v-1) + p-s warm-up forwards on stage s; then I, W and F in turn while forwards are left, then I and W."""
    warm_up = size * (len(s.chunks) - 1) + s.p - s.i
    return rounds(_in_groups(s, size, B), _in_groups(s, size, F).ahead(warm_up))


def gis_group_size(p: int, m: int, asked: int | None = None) -> int:
    """Returns the size asked for, or the smallest possible: from p/2 to p, and a divisor of the number of microbatches.

    Raises ValueError if the size asked for is not possible, or if no size is.
    """
    least = -(-p // 2)
    possible = [size for size in range(least, p + 1) if m % size == 0]
    if not possible:
        near = max(least, round(m / least) * least)
        raise ValueError(
            f"gis runs groups of {least} to {p} microbatches on {p} stages, but num_microbatches ({m}) is no multiple "
            f"of any of these: use {near} instead of {m}"
        )
    size = possible[0] if asked is None else asked
    if size not in possible:
        raise ValueError(
            f"gis on {p} stages with {m} microbatches cannot have groups of {size}: a group_size from {least} to {p} "
            f"that divides {m} is {' or '.join(map(str, possible))}"
        )
    return size


def _check_interleaved(s: Stage) -> None:
    if len(s.chunks) == 1:
        raise ValueError("interleaved-1f1b with 1 chunk per stage is 1f1b: take that, or give chunks_per_stage=2")
    if s.m % s.p:
        below, above = s.m - s.m % s.p, s.m - s.m % s.p + s.p
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"interleaved-1f1b needs num_microbatches ({s.m}) divisible by num_stages ({s.p}): use {use} instead of "
            f"{s.m}"
        )
