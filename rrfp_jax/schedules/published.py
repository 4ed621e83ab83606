"""The schedules that are known by a name, as descriptions; each is registered as this module is imported.

One chunk per stage: GPipe, 1F1B and the zero-bubble pair, which also order the chunks of any graph
---------------------------------------------------------------------------------------------------
GPipe runs all forwards, then all backwards (Huang et al., arXiv 1811.06965). The others run warm-up forwards, then
forward and backward in turn, then the remaining backwards. 1F1B is PipeDream-Flush (Narayanan et al., arXiv
2006.09503). Eager 1F1B runs more forwards in the warm-up, so that a late input does not stall a stage at once (Zhuang
et al., arXiv 2211.05322), at the price of memory. ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241, section 2) are 1F1B
with a split backward, whose W wait until the stage would otherwise idle in the cool-down: a stage that warms up with
few forwards defers many W, so that every stage holds equally many microbatches. ZB-H1 keeps the memory of 1F1B's first
stage; ZB-H2 doubles the warm-up, and at equal F, I and W has no bubble at all but the parallelogram's.

Why no order here can deadlock, whatever the graph. Let ``d(c)`` be the longest way from chunk c to the loss, in hops
between stages, ``D`` the longest of all that have a backward, and k how far the warm-up reaches: 1 in 1F1B and ZB-H1, 2
in ZB-H2. In half-rounds, of which a microbatch has two, ``F(c, m)`` runs at ``2 m - (2 k - 1) d(c)``; its backward B,
or I where it is split, at ``2 m + d(c) + 1``; W, where it is filled in late, at ``2 m + 2 k (D - d(c)) + d(c) + 1``;
and within a half-round first B or I, then W, then F. So a stage with one chunk runs ``k d(c)`` warm-up forwards, then
forward and backward in turn: on a chain of p stages ``d(c) = p - 1 - c``, which gives the published tables. A chunk
holds a microbatch from F to its B (or W), at most ``k d(c) + 1`` of them at once, or ``k D + 1`` with late W.

Where chunk p feeds chunk c on another stage, ``d(p) > d(c)``, so that ``F(p, m)`` is before ``F(c, m)``, and the
backward of c before that of p; F of a chunk is before its backward, and I before W. On one stage the half-rounds may be
equal, and then forwards go by ascending and backwards by descending chunk. So all dependencies lead forward in one
order of all tasks, and every stage follows that order. It holds as well for any part of the tasks: those that a step
lacks are skipped. A chunk that runs F alone has forwards in these places only.

The looped placement: breadth-first, interleaved 1F1B, the same with a split backward, and GIS
----------------------------------------------------------------------------------------------
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

Vocabularies in shards: heads first
-----------------------------------
Where all stages hold shards of embedding and head (:func:`rrfp_jax.schedules.graph.vocabulary_sharded`; Yeung et al.,
arXiv 2411.05288), a microbatch takes the long tasks of a chain, as in 1F1B, and short ones on every stage for which all
others wait. So the short ones go first, within the memory of 1F1B in half-rounds: a chunk of the chain holds a
microbatch for its hops to the loss and back, at most half of them and one more. On p stages that are p + 1 microbatches
with one barrier and p + 2 with two, as published. The paper places its passes by their measured times; here the order
is run with short ones of a fixed length, and as a hint the times of the run itself place them.

It cannot get stuck. At most 2n microbatches are under way if a stage may hold n, and there is memory for their short
tasks beside n, so that these never wait for memory. The chain's microbatches go by number, so the oldest unfinished one
is where no other stands before it: its next task is ready, and has memory.

Slices of sequences: Seq1F1B and SlimPipe
-----------------------------------------
A sequence runs through a chunk in n slices, which attend to earlier ones (:func:`rrfp_jax.schedules.sliced_chain`). So
the pipeline fills and drains by slices, in an n-th of the time, and holds little more than one sequence. **Seq1F1B**
(Sun et al., arXiv 2406.03488) has one chunk per stage, and slices that take equally long. **SlimPipe** (arXiv
2504.14519) interleaves chunks. Its slices are equally long, and stages exchange attention work to take equal times;
that is left out here, since slices that take equally long do as well.

Schedules that meet themselves on the stages: on the V, in waves, and in two directions
---------------------------------------------------------------------------------------
**On the V** stage s owns chunk s on the way down and chunk 2p-1-s on the way back, with a split backward. The stage
that starts first also ends first, and all stages hold equally much.

**DualPipe-V** is the V-shaped half of DualPipe (DeepSeek-V3, arXiv 2412.19437; "cut-in-half" variant by Sea AI Lab). In
its main phase it runs the forward of one microbatch and the backward of another as one overlapped pair, so that the
communication inside one hides behind the computation of the other. The table names these pairs; a stage that makes no
pairs runs them one after the other, forward first. The published schedule mixes full and split backwards of one chunk;
a full one is written as I with its W right behind it, which takes the same time and frees the memory at the same
moment.

**STP** (arXiv 2510.27257) makes pairs of nearly all tasks, for stages that are cut over the axis ``tensor``: F and I
wait for sums over that axis where they run alone, and B hides its own behind its weight gradients. With T for the sums
of one pass, the published idle time is (p-1)(F+T+I-W) + (2p+1)T; interleaved 1F1B has (p-1)(F+T+I+W) + 2mT. As a hint
its W rank last where a stage may hold more than the row does.

**Hanayo** (Liu et al., SC'23, arXiv 2308.15762): one copy of the model goes down and up the stages W times, 2W chunks
per stage, chunks at the turning points on the same stage. It keeps Chimera's short gaps without its second copy of the
weights.

**Chimera** (Li and Hoefler, SC'21, arXiv 2107.06925): two copies of the model in opposite directions. Stage s owns
chunk s of the copy that goes down and chunk p + (p-1-s) of the copy that goes up; half of the microbatches take each
direction, so that the two fill each other's gaps. Both copies hold the same parameters (``graph.shared``): weights take
twice the memory, and their gradients are summed once per step.

**BitPipe** (Wu et al., arXiv 2410.19367): Chimera's two copies, each on a V of 2p chunks, the second V upside down.
Chunks are half as large, so that filling and draining take half as long, and a V turns without leaving the stage.
"""

from functools import partial
from typing import Any

from rrfp_jax.schedules.language import (
    B,
    Described,
    F,
    I,
    Stage,
    TaskOrder,
    W,
    block,
    like,
    owed,
    pair,
    quickest,
    rounds,
    rule,
    slots,
    turns,
)
from rrfp_jax.schedules.language.orders import Stream
from rrfp_jax.schedules.language.stage import Mistake
from rrfp_jax.schedules.registry import schedule
from rrfp_jax.schedules.request import (
    ALTERNATING,
    LOOPED,
    LOOPED_SLICES,
    ONE_EACH,
    SLICED,
    TWO_VS,
    TWO_WAYS,
    WAVES,
    V,
    place_in_unit,
    sharded,
)
from rrfp_jax.schedules.slots import EQUAL
from rrfp_jax.schedules.tasks import Task, TaskKind

_SPLIT_SOURCE = "our construction: 1F1B, split as in Zero Bubble, arXiv 2401.10241"


@schedule("gpipe", shape=ONE_EACH, source="GPipe, arXiv 1811.06965", any_graph=True)
def gpipe(s: Stage) -> TaskOrder:
    """Every stage runs F of all microbatches, then B of all microbatches, both in ascending order."""
    return rounds(F.every(2).ahead(s.hops)) + rounds(B.every(2).behind(s.hops))


@schedule("1f1b-split", shape=ONE_EACH, source=_SPLIT_SOURCE, split_backward=True, weights_fill=True, any_graph=True)
@schedule("1f1b", shape=ONE_EACH, source="PipeDream-Flush, arXiv 2006.09503", any_graph=True)
def one_f_one_b(s: Stage) -> TaskOrder:
    """Stage s runs p-1-s warm-up forwards; it holds at most p-s microbatches.

    With a split backward each W follows its I at once: the same memory, without the weight gradients in fill and drain.
    With hops of c a step takes m(F+I+W) + (p-1)(F+I+2c) while 2c <= W. There is no better order: a stage whose memory
    is full must run a W before the next F, and in the drain the next gradient comes no sooner than the W has ended.
    Where the table ranks ready tasks and a stage may hold more, the times of the run itself show where it would idle:
    then W rank behind F and I. A stage that may hold no more keeps each W in its place: only a W frees memory for the
    next F, so that one I before it holds up every stage behind.
    """
    return rounds(B.every(2).behind(s.hops).behind(1), F.every(2).ahead(s.hops))


@schedule(
    "eager-1f1b",
    shape=ONE_EACH,
    source="Eager-1F1B, arXiv 2211.05322",
    constraints="windows per stage must not grow along the stages",
)
def eager_one_f_one_b(s: Stage) -> TaskOrder:
    """Stage s runs window(s)-1 warm-up forwards and holds at most window(s) microbatches.

    For the windows see :func:`eager_windows`. Raises ValueError if a stage's window is larger than its predecessor's:
    it would wait for forwards that the predecessor must not run before a backward.
    """
    windows = [min(window, s.m) for window in eager_windows(s.p, s.asked.window)]
    if s.i > 0 and windows[s.i] > windows[s.i - 1]:
        raise ValueError(
            f"window {windows[s.i]} of stage {s.i} is larger than window {windows[s.i - 1]} of stage {s.i - 1}, which "
            f"would deadlock: give stage {s.i} at most {windows[s.i - 1]}"
        )
    return rounds(F.ahead(windows[s.i] - 1), B)


def eager_windows(num_stages: int, window: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the in-flight microbatches of every stage: those given, or 2(p-s)-1 on stage s, two warm-up F per hop.

    One number limits the first stage, and each later stage to one less: with equal windows everywhere the last stage
    would spend its window on forwards before its first backward, and every other stage would wait for it.
    """
    if isinstance(window, tuple):
        return window
    eager = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return eager if window is None else tuple(max(1, min(most, window - s)) for s, most in enumerate(eager))


def _zero_bubble(s: Stage, reach: int) -> TaskOrder:
    """``reach`` warm-up F per hop, then F and I in turn, W so late that all stages hold equally many microbatches."""
    return rounds(
        I.every(2).behind(s.hops).behind(1),
        W.every(2).behind(lambda c: 2 * reach * (s.depth - s.hops(c)) + s.hops(c) + 1),
        F.every(2).ahead(lambda c: (2 * reach - 1) * s.hops(c)),
    )


for _name, _reach in (("zb-h1", 1), ("zb-h2", 2)):
    schedule(_name, shape=ONE_EACH, source="Zero Bubble, arXiv 2401.10241", split_backward=True, any_graph=True)(
        partial(_zero_bubble, reach=_reach)
    )


# -- looped ------------------------------------------------------------------------------------------------------------


@schedule("breadth-first", shape=LOOPED, source="Breadth-First Pipeline Parallelism, arXiv 2211.05953")
def breadth_first(s: Stage) -> TaskOrder:  # noqa: ARG001 - all stages alike
    """All microbatches through a chunk before the next chunk of the stage, backwards in reverse (Lamy-Poirier)."""
    return F.rest + B.rest


def _in_groups(s: Stage, size: int, stream: Stream) -> Stream:
    """Returns the stream in groups of microbatches, which visit the stage's chunks in turn, backwards in reverse."""
    chunks = s.chunks if stream is F else s.chunks[::-1]
    return stream.over((c, first + i) for first in range(0, s.m, size) for c in chunks for i in range(size))


def _check_divides(name: str, s: Stage) -> None:
    """Raises ValueError unless p divides the number of microbatches."""
    if s.m % s.p:
        below, above = s.m - s.m % s.p, s.m - s.m % s.p + s.p
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name} needs num_microbatches ({s.m}) divisible by num_stages ({s.p}): use {use} instead of {s.m}"
        )


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
    if len(s.chunks) == 1:
        raise ValueError("interleaved-1f1b with 1 chunk per stage is 1f1b: take that, or give chunks_per_stage=2")
    _check_divides("interleaved-1f1b", s)
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


# -- shards of the vocabulary -----------------------------------------------------------------------------------------

_SHARD = 0.03
"""Length of a shard's task, in those of the chain. The published runs have 0.03 to 0.5. An order for long ones stalls
where they are short, by 11% if it is made for 0.1; one for short ones is as good where they are long."""


def _decoder(s: Stage) -> range:
    """Returns the decoder's chunks, one a stage, of a graph whose other chunks are shards."""
    chain = range(s.p, 2 * s.p)
    if s.graph.num_chunks <= 3 * s.p or any(s.placement.stage_of_chunk[c] != c - s.p for c in chain):
        raise Mistake("heads_first orders shards of a vocabulary: give graph and placement of vocabulary_sharded")
    return chain


def heads_first(s: Stage) -> Described:
    """The order of a graph of :func:`vocabulary_sharded`: shards first, then the chain's B and F in turn.

    The schedule of the name makes the graph of two barriers. For another one give :func:`build_schedule` the function,
    with graph and placement. Raises ValueError for a graph of another kind.
    """
    chain = _decoder(s)
    limits = [(s.hops(c) + s.hops_back[c]) // 2 + 1 for c in chain]
    under_way = 2 * limits[0]
    takes = [s.graph.kept_units(c) / s.graph.memory_unit for c in range(s.graph.num_chunks)]
    shards = sum(takes[c] for c in s.chunks if c not in chain)

    def first(task: Task) -> tuple[int, ...]:
        return (task.chunk in chain, task.microbatch, task.chunk if task.kind is TaskKind.F else -task.chunk)

    return rule(turns(B, F), W, key=first).frozen(
        lengths=lambda task: EQUAL(task) * (1 if task.chunk in chain else _SHARD),
        holding=limits[s.i] * takes[s.p + s.i] + min(under_way, s.m) * shards,
        under_way=under_way,
    )


# Registered as another function, so that heads_first by itself takes graphs.
schedule(
    "vocabulary",
    shape=sharded(),
    source="vocabulary parallelism, arXiv 2411.05288, shards first",
    constraints="vocabulary:2 where a stage sends the stream to 2 others, on slow links",
)(partial(heads_first))


# -- slices of sequences -----------------------------------------------------------------------------------------------


def _in_slices(s: Stage, stream: Stream) -> Stream:
    """Returns the stream with one microbatch after the other, in slices through the stage's chunks, backwards last."""
    chunks = s.chunks if stream is F else s.chunks[::-1]
    return stream.over((c, m) for m in range(s.m) for c in chunks)


@schedule("seq1f1b", shape=SLICED, source="Seq1F1B, arXiv 2406.03488")
def seq_one_f_one_b(s: Stage) -> TaskOrder:
    """1F1B of slices: stage s runs p-2-s+n warm-up forwards, as the first backward is that of a last slice."""
    return rounds(_in_slices(s, F).ahead(s.p - 2 - s.i + len(s.chunks)), _in_slices(s, B))


@schedule(
    "slimpipe",
    shape=LOOPED_SLICES,
    source="SlimPipe, arXiv 2504.14519, without context exchange",
    constraints="at least num_stages - 1 slices where a stage has 2 chunks or more, better num_stages",
)
def slimpipe(s: Stage) -> TaskOrder:
    """All slices of a sequence through a chunk, then through the stage's next one: 2(p-1-s) + nv-1 warm-up forwards.

    With one chunk per stage it is ``seq1f1b``, on slices of equal length. With fewer slices than stages the next chunk
    waits for the first slice to come round. Raises ValueError where that is a circle.
    """
    num_slices = len(s.graph.passes_of(s.chunks[0]))
    if num_slices == len(s.chunks):
        return seq_one_f_one_b(s)
    if num_slices < s.p - 1:
        raise ValueError(
            f"slimpipe sends the slices of a sequence round all {s.p} stages to the next chunk, and {num_slices} are "
            f"too few: give slices={s.p} or more, or chunks_per_stage=1"
        )
    return rounds(_in_slices(s, F).ahead(2 * (s.p - 1 - s.i) + len(s.chunks) - 1), _in_slices(s, B))


# -- V, waves, two directions ------------------------------------------------------------------------------------------


_TWO_WAYS: dict[str, Any] = {"shape": TWO_WAYS, "constraints": "an even number of stages and of microbatches"}


@schedule(
    "hanayo",
    shape=WAVES,
    source="Hanayo, arXiv 2308.15762",
    constraints="an even number of chunks per stage (2 per wave)",
)
def hanayo(s: Stage) -> Described:
    """Waves of at most p microbatches under way: backwards first, then earlier microbatches, then deeper chunks.

    The order is the list schedule with these priorities in slots where F and B last equally long. With p microbatches
    it leaves the gaps of the published figures, 2(p-1) slots of a chunk per stage, for any number of waves; the next
    p microbatches follow as soon as one leaves. Raises ValueError for an odd number of chunks per stage.
    """
    return rule(B, F, key=("microbatch", "-chunk")).frozen(under_way=s.p)


@schedule("chimera", source="Chimera, arXiv 2107.06925", **_TWO_WAYS)
def chimera(s: Stage) -> TaskOrder:
    """The published merge of both directions, and direct concatenation of units of p microbatches (sections 3.1, 3.5).

    With slots in which F and B last equally long, microbatch n of a direction's p/2 is on the direction's c-th chunk
    at slots c + 2n (F) and 2p-1-c+2n (B); the other direction's slots there have the other parity, or lie apart. The
    next unit starts 2p slots later, into the gaps that the first leaves in its drain.
    """

    def at(task: Task) -> int:
        unit, goes_up, n = place_in_unit(s.p, s.m, task.microbatch)
        c = task.chunk - s.p * goes_up
        return 2 * s.p * unit + 2 * n + (c if task.kind is TaskKind.F else 2 * s.p - 1 - c)

    return slots(at)


def asymmetric_chimera_parts(num_stages: int) -> tuple[int, ...]:
    """Returns the relative size of every chunk: 1 in the first half of each direction, 2 in the second."""
    half = num_stages // 2
    return ((1,) * half + (2,) * half) * 2


@schedule(
    "asymmetric-chimera",
    source="our construction after the idea in arXiv 2605.24006",
    chunk_parts=asymmetric_chimera_parts,
    **_TWO_WAYS,
)
def asymmetric_chimera(s: Stage) -> TaskOrder:
    """Chimera whose chunks are cut 1:2: early chunks of both directions get half the layers of late ones.

    *Our construction*: the study names the idea (the two directions of a stage get 1:2 of its blocks) and gives no
    order. Early stages of a direction hold most activations, so they get less of the model; each stage's two chunks
    together hold as much as everywhere. Cut the model in the proportions of :func:`asymmetric_chimera_parts`. The order
    is Chimera's: rules in uneven slots idle more.
    """
    return chimera(s)


@schedule(
    "greedy-chimera",
    shape=ALTERNATING,
    source="Chimera's directions merged greedily, as in arXiv 2605.24006",
    constraints=_TWO_WAYS["constraints"],
)
def greedy_chimera(s: Stage) -> Described:
    """Chimera's directions, microbatches alternating, merged as a list schedule in slots with B = 2F.

    With 8 stages and 16 microbatches stages idle for 26% of the time, as the study found. At most 2p microbatches are
    under way.
    """
    return rule(B, F, key=("microbatch", "-chunk")).frozen(lengths=EQUAL, under_way=2 * s.p)


@schedule(
    "bitpipe",
    shape=TWO_VS,
    source="BitPipe, arXiv 2410.19367",
    constraints="an even number of stages, which divides num_microbatches",
)
def bitpipe(s: Stage) -> Described:
    """Two Vs in opposite directions, microbatches alternating, merged as a list schedule in slots with B = F.

    At most p microbatches are under way, so that units of p follow each other, each into the gaps that the one before
    leaves in its drain. For one unit this is the order of the published figure. Raises ValueError unless p divides the
    number of microbatches: a smaller last unit would leave one direction's gaps open.
    """
    _check_divides("bitpipe", s)
    return rule(B, F, key=("microbatch", "-chunk")).frozen(under_way=s.p)


_CONTROLLABLE = "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"
_FACTS: dict[str, Any] = {"shape": V, "split_backward": True}


@schedule("zb-v", source="Zero Bubble, arXiv 2401.10241, section 6", **_FACTS)
def zb_v(s: Stage) -> TaskOrder:
    """1F1B's memory, and no bubble at F = I = W from 2p-1 microbatches on; with fewer, the later ones are left out."""
    down, back = s.chunks
    order = F[down] * (2 * (s.p - s.i) - 1) + (F[back] + F[down]) * s.i + (F[back] + B[back]) * (s.p - s.i)
    order += (F[down] + B[down] + F[back] + B[back]).until(F[back])
    order += (I[down] + I[back]) * s.i + (I[down] + W[down]) * (s.p - s.i) + W[back].rest + W[down].rest
    return order.written_for(2 * s.p - 1)


@schedule("v-half", source=_CONTROLLABLE, **_FACTS)
def v_half(s: Stage) -> Described:
    """About half of 1F1B's activations, (p+2)//2 microbatches, at about half of its bubble."""
    (down, back), p, i = s.chunks, s.p, s.i
    k = 3 if p % 2 == 0 else 0
    starts = {F[down]: 2 * i, F[back]: 3 * p - i - 2, I[back]: 3 * p + k + 2 * i - 1, I[down]: 6 * p + k - i - 2}
    return block(starts).every(6).packed()


@schedule("v-min", source=_CONTROLLABLE, **_FACTS)
def v_min(s: Stage) -> Described:
    """About a third of 1F1B's activations, (p+4)//3 microbatches, at about two thirds of its bubble."""
    (down, back), p, i = s.chunks, s.p, s.i
    k = 2 if p % 3 == 0 else 0
    starts = {F[down]: i, F[back]: 2 * p - i - 1, I[back]: 2 * p + k + i, I[down]: 4 * p + k - i - 1}
    return block(starts).every(6).packed()


@schedule(
    "dualpipe-v",
    source="DualPipe, arXiv 2412.19437, V-shaped variant; overlapped pairs serialised",
    constraints="at least 2 num_stages microbatches",
    **_FACTS,
)
def dual_pipe_v(s: Stage) -> TaskOrder:
    """The eight phases of the published order; in the drain W is left for gaps. From 2p microbatches on."""
    (down, back), after, here = s.chunks, s.p - 1 - s.i, s.i + 1
    if s.m < 2 * s.p:
        raise ValueError(
            f"dualpipe-v needs at least 2 * num_stages = {2 * s.p} microbatches to fill its two directions, not {s.m}: "
            f"give num_microbatches={2 * s.p} or take zb-v"
        )
    order = F[down] * (2 * after) + (F[down] + F[back]) * here + (B[back] + F[back]) * after
    order += (pair(F[down] + B[back]) + pair(F[back] + B[down])) * (s.m - 2 * s.p + here)
    order += (B[back] + pair(F[back] + B[down])) * after
    order += (B[back] + B[down]) * (here // 2) + (B[back] + I[down]) * (here % 2) + (I[back] + I[down]) * (here // 2)
    return order + (owed + I[down]) * after + owed.rest


@schedule("stp", source="STP, arXiv 2510.27257", weights_fill=True, **_FACTS)
def stp(s: Stage) -> TaskOrder:
    """Forwards and backwards in pairs, whose tensor-parallel sums hide behind each other; W fills the drain.

    Its phases take 3p-1 microbatches; where there are fewer, those that are missing are left out of them.
    """
    (down, back), p, after, here = s.chunks, s.p, s.p - 1 - s.i, s.i + 1
    most = max(s.m, 3 * p - 1)
    steady = 2 * (most - 3 * p + here) + 1
    order = F[down] * (2 * after) + (F[down] + F[back]) * here
    order += F[down] * (here % 2) + pair(F[down] + F[down]) * (here // 2)
    order += (pair(F[back] + I[back]) + pair(F[down] + owed)) * after
    for turn in range(steady):
        # The last backwards of a stage leave their W for the drain.
        kind = I if turn >= steady - s.i else B
        order += pair(F[down] + kind[down]) if turn % 2 else pair(F[back] + kind[back])
    order += (pair(B[down]) + pair(F[back] + I[back])) * (most - p - steady // 2 - 1)
    order += (pair(B[down]) + pair(B[back])) * here
    order += (pair(B[down]) + owed * 2) * after + pair(B[down]) + owed.rest
    return order.written_for(most)
