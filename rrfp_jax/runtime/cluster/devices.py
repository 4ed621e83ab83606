"""The devices of a process among several: which it may see, and whether all are there."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def visible_devices(rank: int, hosts: Sequence[str], num_local: int, environ: Mapping[str, str]) -> str | None:
    """The GPUs of a rank as ``0,1``, where several ranks share its host; None where it may see all.

    The ranks of a host divide its GPUs in order of rank. Where ``CUDA_VISIBLE_DEVICES`` or ``ROCR_VISIBLE_DEVICES``
    already names exactly ``num_local`` devices, a scheduler has done that before.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    if len(neighbours) == 1:
        return None
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ and len([part for part in environ[name].split(",") if part.strip()]) == num_local:
            return None
    first = neighbours.index(rank) * num_local
    return ",".join(str(device) for device in range(first, first + num_local))


def check_devices(rank: int, index: int, processes: Iterable[int], num_ranks: int, num_local: int) -> None:
    """Check what JAX found, the same way on every rank.

    Args:
        index: what JAX calls this process.
        processes: the process of every device of the run.

    Raises:
        ValueError: where a rank has fewer than ``num_local`` devices, or JAX numbers processes differently.
    """
    if index != rank:
        raise ValueError(
            f"this is rank {rank}, but JAX calls it process {index}: number the ranks as JAX does, or set detect "
            "(RRFP_DETECT=1) so that JAX tells them"
        )
    found = Counter(processes)
    short = {r: found[r] for r in range(num_ranks) if found[r] < num_local}
    if short:
        counts = ", ".join(f"rank {r} has {count}" for r, count in short.items())
        raise ValueError(
            f"the layout needs {num_local} devices on each of {num_ranks} ranks ({num_local * num_ranks} in all), but "
            f"{counts}: start more processes, or lower the degrees of parallelism"
        )
