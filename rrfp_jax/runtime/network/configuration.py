"""Whether all ranks were started with the same configuration, and where not, which keys differ."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_MAX_KEYS_SHOWN = 10
_ABSENT = "nothing"


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the canonical JSON of a configuration of plain data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(configurations: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """One line per key (``optimizer.lr``) whose values differ between ranks, with every value and the ranks it has."""
    flat = {rank: dict(_flatten(configuration, "")) for rank, configuration in configurations.items()}
    keys = sorted({key for values in flat.values() for key in values})
    lines = []
    for key in keys:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(flat):
            ranks_of.setdefault(flat[rank].get(key, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            lines.append(f"{key} is " + ", ".join(f"{v:.80} on {name_ranks(r)}" for v, r in ranks_of.items()))
    if len(lines) > _MAX_KEYS_SHOWN:
        lines[_MAX_KEYS_SHOWN:] = [f"and {len(lines) - _MAX_KEYS_SHOWN} more keys"]
    return lines


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, sort_keys=True, default=repr)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
