"""What the control groups of this process allow: memory and processor time, version 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes a huge number for no limit."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process's groups may use, the least of all; None without a limit."""
    found = [int(text) for text in _values(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdecimal()]
    return min((limit for limit in found if limit < _UNLIMITED), default=None)


def core_quota(root: Path = Path("/")) -> float | None:
    """How many cores' time this process's groups may use; None without a limit."""
    quotas = []
    for text in _values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal():
            quotas.append(int(quota) / int(period or _period(root)))
    return min(quotas, default=None)


def _period(root: Path) -> str:
    return next(_values(root, "cpu", "", "cpu.cfs_period_us"), "100000")


def _values(root: Path, controller: str, new_name: str, old_name: str) -> Iterator[str]:
    """What the files of this process's group and of those above it say."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        name, mount = (
            (old_name, root / "sys/fs/cgroup" / controller) if controllers else (new_name, root / "sys/fs/cgroup")
        )
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            try:
                yield (folder / name).read_text().strip()
            except OSError:
                continue
