"""JSON lines and Parquet as data sets: tokenised once, by one process, and read as tokens from then on."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from rrfp_jax.data import text_files
from rrfp_jax.data.config import JsonlConfig, ParquetConfig, kind_of
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.text_files import tokens_of_files
from tests.environment import of_child

TEXTS = [f"document {number} " * (1 + number % 3) for number in range(20)]
ROWS = {"length": 16, "batch_size": 4, "num_microbatches": 2, "pack": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part in (0, 1):
        lines = [json.dumps({"text": text}) for text in TEXTS[part * 10 :][:10]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def found(folder, *, told=None, part="train", kind=JsonlConfig, pattern="*.jsonl", **changes):
    config = kind(path=(str(folder / pattern),), **(ROWS | changes))
    return tokens_of_files(config, part, say=[].append if told is None else told.append)


def text_of(data):
    (tokens,) = data._sets
    return [tokens.decode(tokens.tokens(*tokens.document(number))) for number in range(tokens.num_documents)]


def test_files_are_tokenised_once_and_anew_when_they_change(folder, monkeypatch):
    told = []
    first = found(folder, told=told)
    assert text_of(first) == [f"{text}\0" for text in TEXTS]
    assert told == [f"tokenising 2 files into {first.config.path[0]}, once for all later starts"]
    assert folder / "cache" in first._sets[0].path.parents
    moved = folder / "moved"
    moved.mkdir()
    for name in ("0.jsonl", "1.jsonl"):
        (folder / name).rename(moved / name)
    monkeypatch.setattr(text_files, "tokenize", None)
    again = found(moved, told=told)
    assert again.fingerprint == first.fingerprint
    assert (again.batch(3)["tokens"] == first.batch(3)["tokens"]).all()
    assert len(told) == 1
    monkeypatch.undo()
    (moved / "1.jsonl").write_text('{"text": "another one, long enough"}\n')
    changed = found(moved, told=told, cache=str(folder / "cache" / "rrfp" / "tokens"))
    assert changed.fingerprint != first.fingerprint
    assert len(told) == 2


def test_parquet_is_read_by_its_column(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": TEXTS, "other": range(20)}), folder / "a.parquet")
    of_rows = found(folder, kind=ParquetConfig, pattern="a.parquet", column="content")
    assert (of_rows.batch(0)["tokens"] == found(folder).batch(0)["tokens"]).all()
    with pytest.raises(ValueError, match=r"a.parquet .*column"):
        found(folder, kind=ParquetConfig, pattern="a.parquet")
    held_out = found(folder, kind=ParquetConfig, pattern="*.parquet", column="content", held_out=0.2, part="held_out")
    assert 0 < held_out.num_rows < of_rows.num_rows


def test_a_data_set_that_was_saved_to_the_disk_is_read_as_it_is(folder):
    import pyarrow as pa

    saved, schema = folder / "all" / "train", pa.schema([("n", pa.int64()), ("text", pa.string())])
    saved.mkdir(parents=True)
    names = [f"data-0000{part}-of-00002.arrow" for part in (0, 1)]
    for part, name in enumerate([*names, "cache-0.arrow"]):
        with pa.OSFile(str(saved / name), "w") as file, pa.ipc.new_stream(file, schema) as stream:
            for first in range(part * 10, part * 10 + 10, 5):
                texts = TEXTS[first : first + 5] or ["left over"]
                stream.write_batch(pa.record_batch([list(range(len(texts))), texts], schema=schema))
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    of_rows = found(folder, kind=ParquetConfig, pattern="all/train")
    assert text_of(of_rows) == text_of(found(folder))
    assert kind_of({"path": str(saved)}) == kind_of({"path": str(saved / names[0])}) == "parquet"
    with pytest.raises(ValueError, match=r"holds several data sets: name one of .*all/train"):
        found(folder, kind=ParquetConfig, pattern="all")
    cut = (saved / names[1]).read_bytes()
    (saved / names[1]).write_bytes(cut[: len(cut) // 2])
    with pytest.raises(BrokenData, match=r"00001-of-00002.arrow .*mend it"):
        found(folder, kind=ParquetConfig, pattern="all/train")
    (saved / "state.json").write_text('{"_data_files": [1]}')
    with pytest.raises(ValueError, match=r"state.json is damaged .*: save the data set anew"):
        found(folder, kind=ParquetConfig, pattern="all/train")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (saved / names[1]).unlink()
    with pytest.raises(ValueError, match=r"00001-of-00002.arrow is missing, which state.json beside it names"):
        found(folder, kind=ParquetConfig, pattern="all/train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "broken', r"1.jsonl"),
        ('{"content": "other"}', r"1.jsonl.*text"),
        ('{"text": 3}', r"1.jsonl.*text"),
    ],
)
def test_a_damaged_row_is_refused_by_file_and_row_and_leaves_no_token_set(folder, line, message):
    with (folder / "1.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message) as refusal:
        found(folder)
    assert "11" in str(refusal.value)
    assert not [*(folder / "cache").rglob("header.json")]


def test_what_is_not_there_or_of_another_kind_is_refused(folder):
    with pytest.raises(ValueError, match=r"no file matches .*\*.json.gz: give the paths of existing files"):
        found(folder, pattern="*.json.gz")
    with pytest.raises(ValueError, match=r"none.jsonl does not exist"):
        found(folder, pattern="none.jsonl")
    with pytest.raises(ValueError, match=r"0.jsonl holds no Parquet .*: give other files, or another section"):
        found(folder, kind=ParquetConfig, pattern="0.jsonl")
    with pytest.raises(ValueError, match=r"not enough for a row of 5000: give more text, or a smaller length"):
        found(folder, length=5000, pack=False)


def test_others_wait_and_say_so_but_not_for_ever(folder, monkeypatch):
    told, data = [], []
    first = found(folder, cache=str(folder / "kept"))
    target = first._sets[0].path
    target.rename(folder / "aside")
    with text_files._set_locked(target, 1, told.append):
        with monkeypatch.context() as patched:
            patched.setattr(text_files, "_WAIT_MINUTES", 0.001)
            with pytest.raises(ValueError, match=r"has been tokenising into .* for 0.001 minutes: look at that one"):
                found(folder, cache=str(folder / "kept"))
        waiting = threading.Thread(target=lambda: data.append(found(folder, told=told, cache=str(folder / "kept"))))
        waiting.start()
        while not told:
            waiting.join(0.01)
        (folder / "aside").rename(target)
    waiting.join(60)
    assert data[0].fingerprint == first.fingerprint
    assert len(told) == 1
    assert told[0].startswith(f"waiting for another process, which tokenises into {target}")


@pytest.mark.slow
def test_of_several_processes_one_tokenises(folder):
    code = (
        "import sys\n"
        "from rrfp_jax.data.text_files import tokens_of_files\n"
        "from rrfp_jax.data.config import JsonlConfig\n"
        "if __name__ == '__main__':\n"
        f"    config = JsonlConfig(path=({str(folder / '*.jsonl')!r},), **{ROWS!r})\n"
        "    data = tokens_of_files(config, say=print)\n"
        "    print(data.fingerprint, data.batch(1)['tokens'].sum())\n"
    )
    (folder / "ask.py").write_text(code)
    lines = "".join(json.dumps({"text": f"{number} and more text"}) + "\n" for number in range(30_000))
    (folder / "2.jsonl").write_text(lines)
    environment = of_child() | {"XDG_CACHE_HOME": str(folder / "cache")}
    started = [
        subprocess.Popen([sys.executable, folder / "ask.py"], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=240)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({answer[-1] for answer in answers}) == 1
    assert sum(line.startswith("tokenising") for answer in answers for line in answer) == 1
    assert np.prod([len(answer) for answer in answers]) > 1


def test_a_link_that_a_pattern_finds_stays_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"text": "x"}\n')
    (folder / "a.jsonl").symlink_to("../secret.jsonl")
    config = JsonlConfig(path=(str(folder / "*.jsonl"),), length=8, batch_size=2, num_microbatches=1)
    with pytest.raises(ValueError, match=r"a\.jsonl is a link to .*/secret\.jsonl, which is not in .*texts"):
        tokens_of_files(config, say=print)
