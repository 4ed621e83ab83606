"""Reading files that hold a record, whatever stands in their place."""

import errno
import os
import stat
from pathlib import Path

_LARGEST_BYTES = 1 << 28


def read_record(path: Path) -> tuple[bytes, os.stat_result]:
    """What a record's file holds, and its status; raises OSError also for pipes, devices, and sizes that no record has.

    The file is opened, which asks a file server where a mere look might find an old answer, and never waited for.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is no file", str(path))
        if status.st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"{path.name} is too large for a record", str(path))
        return file.read(), status
