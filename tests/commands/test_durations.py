"""Reading durations: files that are what they should be, and files that are not."""

import numpy as np
import pytest

from rrfp_jax.commands.studies import RecordedDurations, load_durations, load_trace, parse_durations_ms
from rrfp_jax.observe.chrome_trace import write_trace
from rrfp_jax.schedules import Edge, PipelineGraph, absences, bits, chain, linear
from tests.simulation.helpers import by_hint, run

HEAD_OF_TERABYTES = (
    b"\x93NUMPY\x01\x00v\x00" + b"{'descr':'<f8','fortran_order':False,'shape':(1000000000000,4,4),}".ljust(117) + b"\n"
)


def test_a_file_is_read_as_float64(tmp_path):
    np.save(tmp_path / "d.npy", np.ones((2, 4, 8, 3), np.float32))
    durations_ms = load_durations(str(tmp_path / "d.npy")).durations_ms
    assert (durations_ms.shape, durations_ms.dtype) == ((2, 4, 8, 3), np.float64)


def corrupt(path):
    np.save(path, np.ones((2, 4, 8, 3)))
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "cannot read durations"),
        (corrupt, "not a whole .npy file"),
        (lambda path: path.write_bytes(b""), "not a whole .npy file"),
        (lambda path: path.write_bytes(HEAD_OF_TERABYTES), "not a whole .npy file"),
        (lambda path: path.write_text("10,10,10"), "not a whole .npy file"),
        (lambda path: np.save(path, np.array(["a"])), "do not hold one array of real numbers"),
        (lambda path: np.save(path, np.ones((2, 4, 8))), r"shape \[2, 4, 8\]: give"),
        (lambda path: np.save(path, -np.ones((1, 1, 1, 3))), "negative or non-finite"),
    ],
)
def test_other_files_are_refused(tmp_path, write, message):
    path = tmp_path / "d.npy"
    write(path)
    with pytest.raises(ValueError, match=message):
        load_durations(str(path))


def test_several_arrays_are_refused(tmp_path):
    with (tmp_path / "d.npy").open("wb") as file:
        np.savez(file, a=np.ones(3))
    with pytest.raises(ValueError, match="one array of real numbers"):
        load_durations(str(tmp_path / "d.npy"))


def test_a_trace_gives_back_the_run(tmp_path):
    graph = chain(2, 3, split=True)
    durations_ms = np.random.default_rng(0).integers(1, 20, (2, 2, 3, 3)).astype(float)
    timeline = run(by_hint(graph, linear(2)), durations_ms, num_steps=2).timeline
    write_trace(timeline, tmp_path / "trace.json")
    source = RecordedDurations(load_trace(str(tmp_path / "trace.json")), per_task=True)
    assert source.num_steps == 2
    np.testing.assert_allclose(source.for_graph(graph), durations_ms, atol=1e-5)
    assert source.profile_ms() == pytest.approx(tuple(durations_ms.mean(axis=(0, 1, 2))), abs=1e-5)


def test_a_trace_tells_which_pairs_were_not_there(tmp_path):
    graph = PipelineGraph(3, 4, (Edge(0, 1), Edge(1, 2, is_optional=True)))
    durations_ms = np.random.default_rng(0).integers(1, 20, (3, 3, 4, 3)).astype(float)
    durations_ms[..., 2] = 0  # a record does not tell the halves of a whole backward
    lacking = [absences((c, m) for c in (0, 1) for m in some) for some in ([], [1, 3], [0, 1, 2, 3])]
    for step, pairs in enumerate(lacking):
        for chunk, mask in pairs:
            durations_ms[step, chunk, list(bits(mask))] = 0
    timeline = run(by_hint(graph, linear(3)), durations_ms, num_steps=3, absent=lacking).timeline
    write_trace(timeline, tmp_path / "trace.json")
    source = RecordedDurations(load_trace(str(tmp_path / "trace.json")), per_task=True)
    assert list(source.absent) == lacking
    np.testing.assert_allclose(source.for_graph(graph), durations_ms, atol=1e-5)
    with pytest.raises(ValueError, match="no 0F0 in step 2: record a run of the same pipeline"):
        source.for_graph(chain(3, 4))


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_other_json_is_no_trace(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a trace of a run|holds no task"):
        load_trace(str(tmp_path / "t.json"))


@pytest.mark.parametrize("text", ["10", "10,10", "10,10,-1", "a,b,c", "", "10,10,nan"])
def test_three_durations_are_three_numbers(text):
    with pytest.raises(ValueError, match="write"):
        parse_durations_ms(text)
