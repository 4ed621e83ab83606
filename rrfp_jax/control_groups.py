"""The limits that Linux control groups, version 1 and 2, put on this process; containers set them."""

from collections.abc import Iterator
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's control groups allow, the least of all; None without a limit."""
    found = [
        int(text) for text in _group_files(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()
    ]
    return min((limit for limit in found if limit < 1 << 60), default=None)  # version 1 writes a huge number for none


def core_quota(root: Path = Path("/")) -> float | None:
    """Returns the number of cores whose time this process's control groups allow; None without a limit."""
    old_period = next(_group_files(root, "cpu", "", "cpu.cfs_period_us"), "100000")
    quotas = (text.partition(" ") for text in _group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"))
    return min((int(q) / int(period or old_period) for q, _, period in quotas if q.isdigit()), default=None)


def _group_files(root: Path, controller: str, new_name: str, old_name: str) -> Iterator[str]:
    """Yields the text of a file in the folders of this process's group and of all groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and controller not in controllers.split(","):
            continue
        # A line without controllers is that of version 2, whose groups lie in one tree.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / (old_name if controllers else new_name)
            if folder.is_relative_to(mount) and file.is_file():
                yield file.read_text().strip()
