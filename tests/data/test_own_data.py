"""A data set of one's own: its elements by number, or one after the other."""

import json
import sys

import numpy as np
import pytest

from rrfp_jax.data import BrokenData, OwnData, OwnDataConfig

LENGTH, NUM = 6, 10
MODULE = """
import numpy as np

asked = []


class Corpus:
    def __init__(self, num=10, broken=None, **changed):
        self.num, self.broken, self.changed = num, broken, changed

    def __len__(self):
        return self.num

    def __getitem__(self, number):
        asked.append(number)
        if number == self.broken:
            raise KeyError("gone")
        ids = np.arange(6, dtype=np.int64) + number
        leaves = {"tokens": ids, "targets": ids + 1, "weights": np.ones(6), "of_mine": 0}
        leaves |= {"positions": np.arange(6), "segments": np.ones(6, int)}
        return {name: leaf for name, leaf in (leaves | self.changed).items() if leaf is not None}


ready = Corpus()
Corpus.Inner = Corpus


class Empty:
    def __iter__(self):
        return iter([])


class Stream:
    def __init__(self, num=10, as_bytes=False, broken=None):
        self.num, self.as_bytes, self.corpus = num, as_bytes, Corpus(broken=broken)

    def __iter__(self):
        return Drawing(self)


class Drawing:
    def __init__(self, stream):
        self.stream, self.next = stream, 0

    def __next__(self):
        if self.next == self.stream.num:
            raise StopIteration
        self.next += 1
        return self.stream.corpus[self.next - 1]

    def get_state(self):
        return str(self.next).encode() if self.stream.as_bytes else {"next": self.next}

    def set_state(self, state):
        self.next = int(state) if self.stream.as_bytes else state["next"]


generated = lambda num=10: (Corpus()[number] for number in range(num))
running = generated()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_corpus.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_corpus", None)


def data(name="Corpus", part="train", **changes):
    values = {"batch_size": 4, "num_microbatches": 2, "seed": 1}
    return OwnData(OwnDataConfig(object=f"my_corpus:{name}", **(values | changes)), 40, part)


def numbers(batch):
    return np.asarray(batch["tokens"])[..., 0].ravel().tolist()


def test_a_set_that_is_evaluated_counts_each_element_once(module):
    found = data(batch_size=8)
    assert sum(found.batch(step)["weights"].sum() for step in range(3)) == 24 * LENGTH
    found.counts_once = True
    assert sum(found.batch(step)["weights"].sum() for step in range(3)) == NUM * LENGTH


def test_batches_hold_every_element_once_an_epoch_in_an_order_that_follows_from_the_step(module):
    found = data()
    seen = [number for step in range(5) for number in numbers(found.batch(step))]
    assert sorted(seen[:NUM]) == sorted(seen[NUM:]) == [*range(NUM)]
    assert seen[:NUM] != seen[NUM:]
    batch = found.batch(2)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in batch.items()} == {
        "tokens": ((2, 2, LENGTH), "int32"),
        "targets": ((2, 2, LENGTH), "int32"),
        "weights": ((2, 2, LENGTH), "float32"),
    }
    assert numbers(data(num_microbatches=1).batch(2)) == numbers(batch)
    assert [number for step in range(5) for number in numbers(data(shuffle=False).batch(step))] == [*range(NUM)] * 2


def test_only_elements_that_are_read_are_asked_for(module):
    found = data()
    asked = sys.modules["my_corpus"].asked
    asked.clear()
    batch = found.batch(0, {"tokens": range(1, 2)})
    assert asked == numbers({"tokens": batch["tokens"][1]})
    assert (batch["tokens"][0].shape, batch["tokens"][0].dtype) == ((2, LENGTH), np.int32)
    asked.clear()
    assert set(data(pack=True).batch(0, {})) > {"positions", "segments"}
    assert len(asked) == 5  # segments are whole everywhere, and the first element is looked at


def test_the_last_elements_can_be_held_out(module):
    parts = [data(part=part, held_out=0.3, batch_size=1, num_microbatches=1) for part in ("train", "held_out")]
    seen = [{numbers(each.batch(step))[0] for step in range(20)} for each in parts]
    assert seen == [set(range(7)), {7, 8, 9}]
    with pytest.raises(ValueError, match="has 10 elements, and none is left to train on"):
        data(held_out=0.95)


def test_what_is_named_may_be_a_data_set_a_class_or_inside_one(module):
    first = numbers(data().batch(0))
    assert numbers(data("ready").batch(0)) == numbers(data("Corpus.Inner").batch(0)) == first
    assert data(arguments={"num": 5}).num_elements == 5
    assert data().fingerprint == data("ready").fingerprint != data(arguments={"num": 5}).fingerprint


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Nothing", {}, r"my_corpus:Nothing cannot be had \(AttributeError: .*mend object or arguments"),
        ("ready", {"arguments": {"num": 5}}, "it is a data set already and takes no arguments"),
        ("Corpus", {"arguments": {"broken": 0}}, r"element 0 .* cannot be read \(KeyError: 'gone'\): mend"),
        ("Corpus", {"arguments": {"targets": None}}, "element 0 of my_corpus:Corpus lacks targets: it has tokens, "),
        ("Corpus", {"arguments": {"targets": [1, 2]}}, r"has targets of shape \[2\]: let all leaves .* be of one len"),
        ("Corpus", {"arguments": {"tokens": [0.5] * 6}}, "has tokens of float64: give whole numbers"),
        ("Corpus", {"arguments": {"tokens": [39, 40, 0, 0, 0, 0]}}, "tokens from 0 to 40, and the model a vocabulary"),
        (
            "Corpus",
            {"arguments": {"weights": [1, 1, -1, 1, 1, 1]}},
            r"has weights from -1 to 1: give numbers that are",
        ),
        (
            "Corpus",
            {"arguments": {"weights": [1, 1, float("nan"), 1, 1, 1]}},
            "has weights from nan to nan: give numbers that",
        ),
        (
            "Corpus",
            {"arguments": {"weights": [1, 1, 1e300, 1, 1, 1]}},
            r"has weights from 1\.0 to 1e\+300: give numbers that",
        ),
        ("Corpus", {"arguments": {"targets": [1, 2, -100, 3, 4, 5]}}, "has the target -100: where nothing .* weight 0"),
        ("Corpus", {"arguments": {"num": 0}}, "has 0 elements, and none is left to train on"),
        ("Empty", {}, "element 0 of my_corpus:Empty cannot be read .*it has no elements"),
        ("Stream", {"held_out": 0.1}, "my_corpus:Stream only iterates: leave held_out out"),
        ("Drawing", {"arguments": {"stream": None}}, "of type Drawing, without __len__ and .*, and without __iter__"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(module, name, changes, message):
    with pytest.raises(ValueError, match=message):
        data(name, **changes)


def test_an_element_that_fails_later_is_named(module):
    found = data(arguments={"broken": 3})
    with pytest.raises(BrokenData, match=r"element 3 of my_corpus:Corpus cannot be read \(KeyError: 'gone'\)"):
        list(map(found.batch, range(3)))


@pytest.mark.parametrize("name", ["Stream", "generated"])
def test_elements_of_a_set_that_iterates_come_in_order_and_again(module, name):
    found = data(name)
    assert [numbers(found.batch(step)) for step in (1, 0, 3, 2)] == [
        [4, 5, 6, 7],
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [8, 9, 0, 1],
    ]
    assert numbers(found.batch(50)) == [0, 1, 2, 3]
    assert numbers(found.batch(0)) == [0, 1, 2, 3], "the first batch is kept"
    assert numbers(found.batch(2)) == [8, 9, 0, 1], "it has begun anew"
    assert data(name).fingerprint == found.fingerprint
    found.counts_once = True
    assert found.batch(2)["weights"][..., 0].ravel().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("step", [1, 2, 5, 7])
def test_a_set_that_iterates_goes_on_from_its_state(module, step, as_bytes):
    found = data("Stream", arguments={"as_bytes": as_bytes})
    expected = [numbers(found.batch(number)) for number in range(12)]
    state = json.loads(json.dumps(found.state_at(step)))
    again = data("Stream", arguments={"as_bytes": as_bytes})
    again.batch(0)
    again.go_on(step, state)
    sys.modules["my_corpus"].asked.clear()
    assert [numbers(again.batch(number)) for number in range(step, 12)] == expected[step:]
    assert len(sys.modules["my_corpus"].asked) == 4 * (12 - step), "no element is drawn but those"
    assert data("generated").state_at(0) is None


def test_a_set_that_iterates_is_not_read_behind_an_element_that_failed(module):
    found = data("Stream", arguments={"broken": 6}, max_bad_samples=3)
    for _ in range(2):
        with pytest.raises(BrokenData, match=r"element 6 of my_corpus:Stream cannot be read .KeyError: 'gone'"):
            found.batch(1)
    with pytest.raises(BrokenData, match=r"element 7 of my_corpus:Stream cannot be read .KeyError: 'gone'"):
        found.batch(1, None, {2})


def test_an_iterator_that_cannot_begin_anew_is_told(module):
    found = data("running")
    with pytest.raises(BrokenData, match="an iterator cannot begin anew: name a class or a function that makes it"):
        found.batch(2)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_an_iterating_data_set_of_grain_is_one_as_it_stands(module, tmp_path):
    (tmp_path / "iterating_grain.py").write_text(
        "import grain\n"
        "from my_corpus import Corpus\n"
        "def shuffled(seed):\n"
        "    return grain.MapDataset.source(Corpus()).shuffle(seed=seed).to_iter_dataset()\n"
    )
    config = {"object": "iterating_grain:shuffled", "arguments": {"seed": 3}, "batch_size": 4, "num_microbatches": 2}
    found, again = (OwnData(OwnDataConfig(**config), 40) for _ in range(2))
    seen = [numbers(found.batch(step)) for step in range(9)]
    assert sorted([number for batch in seen for number in batch][:NUM]) == [*range(NUM)]
    again.go_on(4, json.loads(json.dumps(found.state_at(4))))
    assert [numbers(again.batch(step)) for step in range(4, 9)] == seen[4:]


@pytest.mark.parametrize("name", ["corpus", "a b:c", ":c", "a:", "a:b-c"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match=r"give package\.module:NAME"):
        OwnDataConfig(object=name, batch_size=1, num_microbatches=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_map_dataset_of_grain_is_one_as_it_stands(module, tmp_path):
    (tmp_path / "with_grain.py").write_text(
        "import grain\n"
        "from my_corpus import Corpus\n"
        "def shuffled(seed):\n"
        "    return grain.MapDataset.source(Corpus()).shuffle(seed=seed).repeat()\n"
    )
    config = {"object": "with_grain:shuffled", "arguments": {"seed": 3}, "batch_size": 4, "num_microbatches": 2}
    found = OwnData(OwnDataConfig(shuffle=False, **config), 40)
    seen = [number for step in range(5) for number in numbers(found.batch(step))]
    assert sorted(seen[:NUM]) == sorted(seen[NUM:]) == [*range(NUM)]
    assert seen[:NUM] != seen[NUM:]
    assert numbers(OwnData(OwnDataConfig(**config), 40).batch(3)) == numbers(
        OwnData(OwnDataConfig(**config), 40).batch(3)
    )


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:exec", "my_corpus:os.system", "my_corpus:eval"]
)
def test_what_python_itself_has_is_not_called(module, tmp_path, name):
    (tmp_path / "my_corpus.py").write_text("import os\neval = eval\n")
    with pytest.raises(ValueError, match=f"object {name} is of Python's standard library: name a class, function or"):
        OwnData(OwnDataConfig(object=name, arguments={"command": "touch ran"}, batch_size=2, num_microbatches=1), 100)
    assert not (tmp_path / "ran").exists()


def test_an_element_that_is_left_out_keeps_its_place_and_counts_nothing(module):
    found = data(arguments={"broken": 2}, shuffle=False)
    with pytest.raises(BrokenData) as caught:
        found.batch(0)
    assert caught.value.sample == 2
    batch = found.batch(0, None, {2})
    assert np.asarray(batch["weights"]).reshape(4, -1).sum(axis=1).tolist() == [6.0, 6.0, 0.0, 6.0]
    assert np.asarray(batch["tokens"]).shape == np.asarray(found.batch(1)["tokens"]).shape
