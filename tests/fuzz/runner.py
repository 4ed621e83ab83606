"""Runs compositions in worker processes, keeps every result in a file, and sums up all of them."""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.composition import GROUP, drawn
from tests.fuzz.worker import MOST_S, environment_of_workers, serve

FOLDER = Path("runs/fuzz")
HANG_S = 120.0
"""Seconds after which a composition hangs: its process is ended, and the stacks of its threads are kept."""
MOST_REFUSED = 0.05
"""The share of compositions above which a refusing sentence is shown: the drawing, or the rule, is wrong."""
_FIRST_S = 240.0
"""Seconds that a worker may take to start and for its first composition, beside ``HANG_S``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try compositions; returns 0, or 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600, help="numbers 0 to CASES - 1 of every seed")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one seed or several")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results are kept, and compiled programs")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="try this one alone, in this process, and shrink it")
    parser.add_argument("--no-shrink", action="store_true", help="leave findings as they were drawn")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    environment_of_workers(options.folder)
    if options.case:
        seed, number = map(int, options.case.split(":"))
        return _replay(seed, number, shrinks=not options.no_shrink)
    results = [Results(options.folder / f"seed-{seed}.jsonl", seed) for seed in options.seed]
    for of_seed in results:
        missing = [number for number in range(options.cases) if number not in of_seed.by_number]
        _run(of_seed, missing, num_workers=options.workers, shrinks=not options.no_shrink)
    return summary([r for of_seed in results for r in of_seed.by_number.values() if r["number"] < options.cases])


class Results:
    """The results of one seed: a JSON line for each composition, appended as they come."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.by_number: dict[int, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                self._keep(json.loads(line))
            except ValueError:  # the last line of a run that was stopped while it wrote
                continue

    def add(self, **result: Any) -> None:
        """Keep a result, here and in the file."""
        result["seed"] = self.seed
        self._keep(result)
        if result["kind"] in ("found", "hung"):
            print(_words(result), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def _keep(self, result: dict[str, Any]) -> None:
        self.by_number[result["number"]] = result


class Worker:
    """One process, the numbers that it is to try, and the state of its work."""

    def __init__(self, results: Results, place: int, hang_s: float = HANG_S) -> None:
        self._results, self._hang_s = results, hang_s
        self._stacks = results.path.with_suffix(f".stacks-{place}")
        self.numbers: list[int] = []
        """The numbers that the process tries next, one after the other."""
        self._told: dict[str, Any] | None = None
        """The facts about a finding that is being shrunk."""
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        arguments = (other, str(self._stacks), self._hang_s)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._allowed_s = self._hang_s + _FIRST_S

    def begin(self) -> bool:
        """Let the process try its next number; returns whether there is one."""
        if not self.numbers:
            return False
        self._number = self.numbers.pop(0)
        self.connection.send(drawn(self._results.seed, self._number))
        self.ends_s = time.monotonic() + self._allowed_s
        self._allowed_s = self._hang_s
        return True

    def take(self, known: set[str]) -> bool:
        """Keep the process's answer, or that it hangs or has died; returns whether it is done with its number.

        A finding whose sentence is not ``known`` is shrunk first.
        """
        told = self._told or {"number": self._number, "composition": str(drawn(self._results.seed, self._number))}
        try:
            if not self.connection.poll():
                raise EOFError
            said = self.connection.recv()
            if self._told is not None:
                told["shrunk"] = str(said)
            else:
                outcome, took_s = said
                told |= vars(outcome) | {"sentence": outcome.sentence, "took_s": round(took_s, 3)}
                if outcome.kind == "found":
                    wanted = outcome.sentence not in known
                    known.add(outcome.sentence)
                    self.connection.send(wanted)
                    if wanted:
                        self._told, self.ends_s = told, time.monotonic() + MOST_S + 2 * self._hang_s
                        return False
        except (EOFError, OSError):
            end = self._restart()
            told |= (
                {"shrunk": "no end"} if self._told else {"kind": "hung", "text": end, "sentence": end.split("\n")[0]}
            )
            told.setdefault("took_s", self._hang_s)
        self._told = None
        self._results.add(**told)
        return True

    def _restart(self) -> str:
        """End the process, start another one, and return the facts about its end."""
        code = self._process.exitcode
        self.end()
        self.connection.close()
        stacks = self._stacks.read_text() if self._stacks.exists() else ""
        self._start()
        return f"no end after {self._hang_s:g} s\n{stacks}" if code is None else f"ended with code {code}\n{stacks}"

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _run(results: Results, numbers: list[int], *, num_workers: int, shrinks: bool) -> None:
    """Try these numbers; a worker takes all that share a setup, so that it compiles once for them."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        groups[number // GROUP].append(number)
    waiting = list(groups.values())
    known = {r["sentence"] for r in results.by_number.values()} if shrinks else _Everything()
    workers = [Worker(results, place) for place in range(min(num_workers, len(groups)))]
    begun_s, done, busy = time.monotonic(), 0, set[Worker]()
    try:
        while True:
            for worker in workers:
                if worker not in busy:
                    worker.numbers = worker.numbers or (waiting.pop(0) if waiting else [])
                    busy |= {worker} if worker.begin() else set()
            if not busy:
                return
            ready = multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1.0)
            for worker in list(busy):
                is_late = time.monotonic() > worker.ends_s
                if (worker.connection in ready or is_late) and worker.take(known):
                    busy.discard(worker)
                    done += 1
                    if done % 60 == 0:
                        each_s = (time.monotonic() - begun_s) / done
                        print(f"seed {results.seed}: {done} of {len(numbers)}, {each_s:.2f} s for each", flush=True)
    finally:
        for worker in workers:
            worker.end()


class _Everything(set[str]):
    """A set that holds every sentence."""

    def __contains__(self, sentence: object) -> bool:
        return True


def _words(result: dict[str, Any]) -> str:
    lines = [f"{result['kind']} by --case {result['seed']}:{result['number']}: {result['text'][:1000]}"]
    lines.append(f"  {result['composition']}")
    if "shrunk" in result:
        lines.append(f"  shrunk: {result['shrunk']}")
    return "\n".join(lines)


def summary(results: Sequence[dict[str, Any]]) -> int:
    """Print counts, findings and refusals; returns 1 if something was found."""
    counts = Counter(result["kind"] for result in results)
    bad = [result for result in results if result["kind"] in ("found", "hung")]
    by_sentence: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in bad:
        by_sentence[result["sentence"]].append(result)
    for same in by_sentence.values():
        print(f"\n{len(same)} times, by --case " + ", ".join(f"{r['seed']}:{r['number']}" for r in same[:8]))
        print(_words(next((r for r in same if "shrunk" in r), same[0])))
    refused = Counter(result["sentence"] for result in results if result["kind"] == "refused")
    print(f"\n{counts['refused']} refused, by {len(refused)} sentences:")
    for sentence, count in refused.most_common():
        share = count / len(results)
        example = next(r for r in results if r["kind"] == "refused" and r["sentence"] == sentence)
        warning = f"MORE THAN {MOST_REFUSED:.0%}: " if share > MOST_REFUSED else ""
        print(f"{count:6d}  {warning}{example['text'][:300]}  (--case {example['seed']}:{example['number']})")
    mean_s = sum(result["took_s"] for result in results) / max(1, len(results))
    print(f"\n{len(results)} compositions: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())), end="; ")
    print(f"{mean_s:.2f} s for each in the mean")
    return 1 if bad else 0


def _replay(seed: int, number: int, *, shrinks: bool) -> int:
    from tests.fuzz.worker import prepare

    prepare()
    from tests.fuzz.shrinking import shrunk
    from tests.fuzz.trial import FOUND, tried

    composition = drawn(seed, number)
    print(composition)
    outcome = tried(composition)
    print(f"{outcome.kind}: {outcome.text}")
    if outcome.kind == FOUND and shrinks:
        print(f"shrunk: {shrunk(composition, outcome)}")
    return int(outcome.kind == FOUND)
