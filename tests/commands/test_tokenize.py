"""``rrfp tokenize`` as one calls it: what it prints, what it refuses, and that a kill in the middle changes no byte."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrfp_jax.commands import tokenize
from rrfp_jax.data.tokens import write_token_set
from tests.commands.running import ROOT, run_command, sentence
from tests.environment import of_child


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The first [text] of all.")
    (folder / "b.jsonl").write_text('{"body": "The second one: süß."}\n')
    return folder


def test_a_token_set_is_made_shown_and_checked(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    options = ("--tokenizer", "train", "--vocab-size", 260, "--column", "body")
    made = run_command("tokenize", texts, "--out", out, *options)
    assert made.returncode == 0, made.stderr
    assert f"{out}: 2 documents, " in made.stdout
    shown = run_command("tokenize", "--show", out, "--document", 1)
    assert shown.stdout.endswith("tokens:\n\nThe second one: süß.\n")
    first = run_command("tokenize", "--show", out, "--json")
    assert json.loads(first.stdout)["text"] == "The first [text] of all."
    assert run_command("tokenize", "--check", out).stdout.endswith("as they were written\n")
    data = bytearray((out / "tokens.bin").read_bytes())
    data[0] ^= 1
    (out / "tokens.bin").write_bytes(bytes(data))
    assert "tokens.bin is damaged (its SHA-256 is not the header's)" in sentence(
        run_command("tokenize", "--check", out)
    )


def test_a_tokenizer_alone_is_made_and_can_be_taken(texts: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "tokenizer.json"
    arguments = (texts, "--column", "body", "--out")
    trained = run_command("tokenize", "--train", *arguments, file, "--vocab-size", 262, "--json")
    assert json.loads(trained.stdout) == {"out": str(file), "vocab_size": 262}
    made = run_command("tokenize", *arguments, tmp_path / "set", "--tokenizer", file, "--json")
    assert json.loads(made.stdout)["header"]["vocab_size"] == 262
    assert "tokenizer.json exists" in sentence(run_command("tokenize", "--train", *arguments, file))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["IN"], "out is missing: name the token set's new folder with --out"),
        (["--out", "OUT"], "there is no input"),
        (["IN", "--out", "OUT"], "b.jsonl, line 1 has no column 'text' (it has body)"),
        (["IN", "--out", "OUT", "--workers", "0"], "workers is 0: give at least 1"),
        (["IN", "--out", "OUT", "--train-on", "7"], "train-on is '7', which is no size"),
        (["IN", "--show", "OUT"], "--show looks at a token set that is there"),
        (["--check", "OUT", "--show", "OUT"], "--show and --check do different things"),
        (["IN", "--out", "OUT", "--document", "1"], "give --show DIR with it"),
        (["--show", "IN"], "is no token set, for it has no header.json"),
        (["IN", "--train", "--out", "OUT", "--tokenizer", "f.json"], "train makes a tokenizer: leave --tokenizer out"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    texts: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    names = {"IN": str(texts), "OUT": str(tmp_path / "out")}
    assert words in sentence(run_command("tokenize", *(names.get(each, each) for each in arguments)))
    assert not (tmp_path / "out").exists()


def large(folder: Path) -> Path:
    """Some 25 MB of lines and of text."""
    folder.mkdir()
    files = [path for path in sorted(Path(os.__file__).parent.glob("*.py")) if path.stat().st_size > 10_000]
    lines = [json.dumps({"text": path.read_text(errors="replace")}) + "\n" for path in files]
    (folder / "a.jsonl").write_text("".join(lines) * 3)
    (folder / "b.txt").write_text("".join(path.read_text(errors="replace") for path in files))
    return folder


def command(texts: Path, out: Path, workers: int) -> list[str]:
    arguments = [str(texts), "--out", str(out), "--workers", str(workers), "--tokenizer", str(texts.parent / "t.json")]
    return [sys.executable, "-m", "experiments.tokenize", *arguments]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_neither_the_number_of_workers_nor_a_kill_changes_a_byte(tmp_path: Path) -> None:
    texts = large(tmp_path / "texts")
    small = tmp_path / "small"
    small.mkdir()
    (small / "a.py").write_bytes((Path(os.__file__).parent / "argparse.py").read_bytes())
    run_command("tokenize", "--train", small, "--out", tmp_path / "t.json", "--vocab-size", 1000)
    expected = None
    for workers in (1, 2, 4):
        out = tmp_path / f"set{workers}"
        begun = subprocess.Popen(
            command(texts, out, workers), cwd=ROOT, env=of_child(), stderr=subprocess.DEVNULL, start_new_session=True
        )
        kill_once_some_pieces_are_done(begun, out.with_name(f"{out.name}.unfinished"))
        assert not out.exists()
        done = subprocess.run(
            command(texts, out, workers), cwd=ROOT, env=of_child(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert " pieces were there already" in done.stderr
        found = {path.name: path.read_bytes() for path in out.iterdir()}
        expected = expected or found
        assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set1", "set2", "set4", "small", "t.json", "texts"]


def kill_once_some_pieces_are_done(process: subprocess.Popen, folder: Path) -> None:
    """The parent alone; its workers end by themselves."""
    while len(list(folder.glob("pieces/*.piece"))) < 3:
        assert process.poll() is None, "it was done before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    group, deadline = process.pid, time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def members(group: int) -> list[int]:
    """The processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    texts, out = large(tmp_path / "texts"), tmp_path / "set"
    arguments = [*command(texts, out, 2)[:-2], "--tokenizer", "train"]
    begun = subprocess.Popen(
        arguments, cwd=ROOT, env=of_child(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(tmp_path.glob("set.unfinished/pieces/*.piece")):
        assert begun.poll() is None
        time.sleep(0.01)
    workers = [number for number in members(begun.pid) if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, told = begun.communicate(timeout=120)
    assert begun.returncode == 5
    assert "error: a process that tokenised was killed, perhaps for want of memory" in told
    assert "Traceback" not in told


def test_of_a_document_of_terabytes_the_beginning_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token_set(tmp_path / "set", [[1]])
    num_tokens, path = 10**12, tmp_path / "set/header.json"
    (tmp_path / "set/documents.bin").write_bytes(num_tokens.to_bytes(8, "little"))
    os.truncate(tmp_path / "set/tokens.bin", 2 * num_tokens)
    header = json.loads(path.read_text())
    header["tokens"]["num_bytes"] = 2 * num_tokens
    path.write_text(json.dumps(header | {"num_tokens": num_tokens}))
    assert tokenize.main(["--show", str(tmp_path / "set")]) == 0
    told, _, text = capsys.readouterr().out.partition(":\n\n")
    assert told.endswith("document 0, 1,000,000,000,000 tokens, the first 1,048,576")
    assert len(text) < 1 << 21


def test_how_much_a_tokenizer_does_not_know_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("one two one three")
    options = ["--out", str(tmp_path / "set"), "--tokenizer", str(tmp_path / "words.json"), "--workers", "1"]
    assert tokenize.main([str(tmp_path / "a.txt"), *options]) == 0
    assert "2 tokens (50.00%) stand for what the tokenizer does not know" in " ".join(capsys.readouterr().out.split())
