"""Results of a study: looked up by system and case, and as plain rows for files and programs."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.systems.cells import Case, CaseResult, Executed, Ideal, Setting
from experiments.systems.options import Wishes
from experiments.systems.records import Hop, System
from experiments.systems.turnovers import Turnover
from rrfp_jax.core import STRICT
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.simulation import Communication


@dataclass(frozen=True, kw_only=True)
class Study:
    """Results of all levels of all cases that fit."""

    wishes: Wishes
    results: tuple[CaseResult, ...]
    turnovers: tuple[Turnover, ...]

    @cached_property
    def ideals(self) -> dict[Case, Ideal]:
        return {one.case: one.ideal for one in self.results if one.ideal is not None}

    @cached_property
    def executed(self) -> dict[tuple[Case, Setting], Executed]:
        return {(one.case, setting): done for one in self.results for setting, done in one.executed}

    @property
    def refused(self) -> dict[Case, str]:
        return {one.case: one.refused for one in self.results if one.refused is not None}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Pairs (stages, microbatches) at which some schedule fits."""
        return list(dict.fromkeys((case.num_stages, case.num_microbatches) for case in self.ideals))

    def cases_of(self, labels: Sequence[str], num_stages: int, num_microbatches: int) -> list[Case]:
        """Returns the cases of these schedules at a size; none where not all of them are there."""
        by_label = {case.entry.label: case for case in self.ideals if case[1:] == (num_stages, num_microbatches)}
        return [by_label[label] for label in labels] if set(labels) <= by_label.keys() else []

    def gain(self, case: Case, order: str, other: Case, communication: Communication, hop: Hop) -> float | None:
        """Returns the part of its own step by which a case in this order is faster than another, run strictly; None
        where one of them does not fit."""
        mine = self.executed.get((case, Setting(hop, communication, order)))
        others = self.executed.get((other, Setting(hop, communication, STRICT)))
        return None if mine is None or others is None else others.step / mine.step - 1


def distinct_hops(systems: Sequence[System], num_stages: int) -> list[Hop]:
    """Returns the different hops of the systems for so many stages, the least ratio first."""
    return sorted({system.hop(num_stages) for system in systems})


def systems_by_hop(systems: Sequence[System], num_stages: int) -> list[tuple[Hop, list[System]]]:
    """Returns the systems that are equal to a schedule, with their hop."""
    ordered = sorted(systems, key=lambda system: system.hop(num_stages))
    return [(hop, list(same)) for hop, same in groupby(ordered, key=lambda system: system.hop(num_stages))]


def rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yields one row for each system, case, mode and order."""
    for system in study.wishes.systems:
        for case, ideal in study.ideals.items():
            hop, forward_ms = system.hop(case.num_stages), system.forward_ms(case.num_stages)
            for communication in study.wishes.communications:
                for order in study.wishes.orders:
                    done = study.executed[case, Setting(hop, communication, order)]
                    yield {
                        "network": system.network_level,
                        "compute": system.compute_level,
                        "stages": case.num_stages,
                        "microbatches": case.num_microbatches,
                        "forward_ms": round(forward_ms, 9),
                        "hop_ms": round(system.hop_ms, 9),
                        "hop_per_forward": hop.ratio,
                        "schedule": case.entry.label,
                        "bubble_paper": ideal.paper,
                        "bubble_closed_form": ideal.closed_form,
                        "bubble_table": ideal.bubble,
                        "step_table_ms": round(ideal.step * forward_ms, 9),
                        "peak_table": ideal.peak,
                        "communication": communication.value,
                        "order": order,
                        "step_ms": round(done.step * forward_ms, 9),
                        "bubble": done.bubble,
                        "peak": done.peak,
                    }


def turnover_rows(study: Study) -> Iterator[dict[str, Any]]:
    """Yields one row for each two schedules of a size that change places."""
    for one in study.turnovers:
        ahead, behind = study.ideals[one.ahead], study.ideals[one.behind]
        yield {
            "stages": one.ahead.num_stages,
            "microbatches": one.ahead.num_microbatches,
            "communication": one.communication.value,
            "ahead_by_table": one.ahead.entry.label,
            "behind_by_table": one.behind.entry.label,
            "lead_by_table": behind.step / ahead.step - 1,
            "bubble_of_ahead_by_formula": ahead.by_formula,
            "bubble_of_behind_by_formula": behind.by_formula,
            "turned_over_at_hop_per_forward": one.ratio,
        }


def write_csv(records: Iterator[Mapping[str, Any]], path: Path) -> None:
    """Writes records of one form; the file is empty where there is none."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for record in records:
            if writer is None:
                writer = csv.DictWriter(file, list(record))
                writer.writeheader()
            writer.writerow(record)


def as_json(study: Study) -> dict[str, Any]:
    """Returns the study as JSON for programs."""
    return {
        "systems": [
            {
                "network": system.network_level,
                "compute": system.compute_level,
                "hop_ms": system.hop_ms,
                "stages": {
                    str(p): {"forward_ms": system.forward_ms(p), "hop_per_forward": system.hop(p).ratio}
                    for p in study.wishes.stages
                },
            }
            for system in study.wishes.systems
        ],
        "cells": list(rows(study)),
        "turnovers": list(turnover_rows(study)),
        "refused": [
            {"schedule": case.entry.label, "stages": case.num_stages, "microbatches": case.num_microbatches, "why": why}
            for case, why in study.refused.items()
        ],
    }
