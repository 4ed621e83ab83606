"""Tables as torch.distributed.pipelining writes them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rrfp_jax.schedules import (
    Op,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    Task,
    build_schedule,
    chain,
    from_csv,
    linear,
    looped,
    read_csv,
    schedule_names,
    to_csv,
    v_shaped,
    with_operations,
    write_csv,
)
from rrfp_jax.schedules.operations import copy_ops

REQUEST = ScheduleRequest(num_stages=4, num_microbatches=8)


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_survives_a_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    table = build_schedule(name, REQUEST)
    path = tmp_path / f"{name}.csv"
    write_csv(table, path)
    assert table.graph.weights or read_csv(path) == table, "slices and shards are not seen from their rows"
    assert read_csv(path, placement=table.placement, graph=table.graph) == table


def test_empty_cells_and_carriage_returns_are_kept_and_ignored() -> None:
    table = from_csv("0F0,,0B0\r\n,1F0,1B0\r\n\r\n")
    assert table.rows == ((Task.parse("0F0"), None, Task.parse("0B0")), (None, Task.parse("1F0"), Task.parse("1B0")))
    assert to_csv(table) == "0F0,,0B0\n,1F0,1B0\n"


def test_an_overlapped_pair_and_a_full_backward_of_a_split_chunk_are_read_as_their_parts() -> None:
    table = from_csv("0F0,0F1,1F0,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1")
    assert " ".join(map(str, table.orders[0])) == "0F0 0F1 1F0 1B0 1F1 0I0 0W0 1B1 0I1 0W1"
    assert table.graph.split == {0}
    assert [tuple(map(str, pair)) for pair in table.pairs] == [("1F1", "0I0")]
    assert to_csv(table) == "0F0,0F1,1F0,1B0,(1F1;0I0)OVERLAP_F_B,0W0,1B1,0I1,0W1\n"


def test_what_torch_adds_in_lowering_is_left_out_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lowered = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"
    assert from_csv(lowered, name="dumped") == from_csv("0F0,0B0\n1F0,1B0\n", name="dumped")
    assert [record.getMessage() for record in caplog.records] == [
        "table 'dumped': its RECV_B, RECV_F, REDUCE_GRAD, RESHARD, SEND_B, SEND_F, UNSHARD are left out, "
        "stages send and keep what they need"
    ]


def test_placement_and_graph_are_inferred() -> None:
    looping = build_schedule("interleaved-1f1b", REQUEST)
    assert from_csv(to_csv(looping)).placement == looped(4, 2)
    bidirectional = build_schedule("chimera", REQUEST)
    read = from_csv(to_csv(bidirectional))
    assert read.placement == v_shaped(4)
    assert read.graph.shared == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no task"),
        ("0F0,0SENT_F0,0B0", "stage 0, column 1: '0SENT_F0' is not a task"),
        ("0F0,0B0,0U", "'0U' runs once per step"),
        ("0F0,hello", "column 1: 'hello' is not a task: write chunk, kind and microbatch"),
        ("0F0,0B0\n0F1,0B1", "chunk 0 appears on stages 0 and 1"),
        ("0F0,0B0\n2F0,2B0", "has no task of chunks [1]"),
        ("0F0,0B0\n1F0", "misses 1B0"),
        ("0F0,0B0\n1F1,1B1", "misses 0F1, 0B1, 1F0, 1B0"),
    ],
)
def test_what_is_not_a_table_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="csv") as caught:
        from_csv(text)
    assert words in str(caught.value)


def test_a_given_placement_or_graph_is_checked() -> None:
    with pytest.raises(ValueError, match="0F0 belongs to stage 1"):
        from_csv("0F0,0B0\n1F0,1B0", placement=Placement((1, 0)))
    with pytest.raises(ValueError, match="1 lines for 2 stages"):
        from_csv("0F0,0B0", placement=linear(2))
    with pytest.raises(ValueError, match="misses 0F1"):
        from_csv("0F0,0B0", graph=chain(1, 2))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_csv(tmp_path / "nowhere.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_csv(binary)


def with_copies(name: str, letters: tuple[str, str] = ("O", "L")) -> ScheduleTable:
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    pairs = frozenset((0, m) for m in table.graph.microbatches(0))
    out = Op(letters[0], after=("F",), lane="d2h", frees=1.0, pairs=pairs)
    return with_operations(table, (out, Op(letters[1], after=letters[:1], before=("B",), holds=1.0, pairs=pairs)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "chimera", "bitpipe"])
@pytest.mark.parametrize("letters", [("O", "L"), ("RESHARD", "UNSHARD")])
def test_operations_are_read_where_the_graph_has_them(name: str, letters: tuple[str, str]) -> None:
    table = with_copies(name, letters)
    assert from_csv(to_csv(table), name=name, placement=table.placement, graph=table.graph) == table


def test_copies_are_read_with_their_turns() -> None:
    table = from_csv("0F0,0O0,0F1,1F0,1B0,0L0,1F1,1B1,0B1,0B0", ops=copy_ops(2.0))
    out, back = table.graph.ops
    assert (out.pairs, back.pairs, out.ms) == ({(0, 0)}, {(0, 0)}, 2.0)
    assert back.waits == {(Task.parse("0L0"), Task.parse("0O0"))}
    assert from_csv(to_csv(table), ops=copy_ops(2.0)) == replace(table, name="csv")
    assert not from_csv("0F0,0B0", ops=copy_ops(2.0)).graph.ops
    with pytest.raises(ValueError, match="0L0 before 0O0"):
        from_csv("0F0,0L0,0O0,0B0", ops=copy_ops(2.0))
    with pytest.raises(ValueError, match="frees what nothing takes back"):
        from_csv("0F0,0O0,0B0", ops=copy_ops(2.0))


def test_operations_that_no_graph_has_are_named() -> None:
    table = with_copies("1f1b")
    with pytest.raises(ValueError, match=r"operations L, O, and no cell says what they wait for .* give a graph"):
        from_csv(to_csv(table))
    with pytest.raises(ValueError, match="names operations L, O"):
        from_csv(to_csv(table), graph=build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=8)).graph)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F999999999999,0B0\n", "names microbatch 999999999999 and holds 2 tasks: number them from 0 without gaps"),
        ("0F100000000,0B100000000\n", "names microbatch 100000000 and holds 2 tasks"),
        ("99999999F0,99999999B0\n", "names chunk 99999999 and holds 2 tasks"),
        ('"' + "a" * 200_000, "field larger than field limit"),
        ("(" * 50_000 + "0F0)OVERLAP_F_B\n", "is not a task: write one, such as 2F5"),
        ("9" * 5000 + "F0\n", "is not a task: write one, such as 2F5"),
    ],
    ids=["microbatch", "microbatches", "chunks", "quoted", "brackets", "digits"],
)
def test_a_table_is_refused_before_anything_is_made_as_large_as_its_numbers(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        from_csv(text)
    assert len(str(refused.value)) < 500


def test_a_table_of_empty_lines_or_cells_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for text, words in (
        ("\n" * 20_000 + "0F0,0B0\n", "more than 16384 lines"),
        ("," * (1 << 24), "more than 16,777,2"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(ValueError, match=words):
            read_csv(path)
