"""Writes a step whose parameters come from elsewhere, layer by layer, so that no model is ever held."""

import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.checkpoint._arrays import PARAMS, HostArray
from rrfp_jax.checkpoint._part_writer import PartWriter, StepPart, part_name
from rrfp_jax.checkpoint._records import Commit, step_directory, sync_directory

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
_BATCH_BYTES = 1 << 20  # one array at a time, but for small ones: memory counts more here than speed


@dataclass(frozen=True)
class ReadLater:
    """An array that is read when it is written, and not held before or after."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        elements = self.read()
        return elements if dtype is None else elements.astype(dtype, copy=False)


class LayerWriter:
    """Writes the parameters of a model as a step without optimizer state; every layer is a part of its own.

    Args:
        root: the folder of the checkpoints; made if it is missing.
        step: the number of steps that the parameters have been trained here.

    Nothing counts before :meth:`commit`.
    """

    def __init__(self, root: Path, step: int = 0) -> None:
        self._step, self._directory = step, step_directory(root.absolute(), step)
        self._data = f"data-{secrets.token_hex(4)}"
        (self._directory / self._data).mkdir(parents=True)
        self._checksums: dict[str, str] = {}

    def write(self, layer: str, arrays: Mapping[tuple[str, ...], ReadLater]) -> None:
        """Writes a layer, whose arrays come by their path inside it; memory holds one of them at a time.

        Raises the errors of reading the arrays, and OSError.
        """
        part = StepPart(name=part_name(layer), layers=(layer,), ranks=(0,))
        folder = self._directory / self._data
        held = {}
        for path, array in arrays.items():
            everything = (slice(None),) * len(array.shape)
            held[layer, PARAMS, *path] = HostArray(array.shape, array.dtype, array.shape, ((everything, array),))
        writer = PartWriter(0, [part], [0], batch_bytes=_BATCH_BYTES)
        try:
            writer.write(folder, held)
            self._checksums |= writer.finish(folder, held)
        except ValueError as error:
            if (code := _SYSTEM_ERROR.search(str(error))) is None:
                raise
            # TensorStore reports a refusal by the file system as a ValueError, like every other error.
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(folder)) from error
        finally:
            writer.close()

    def commit(self, host: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
        """Makes the step count, with plain data beside the arrays."""
        sync_directory(self._directory / self._data)
        Commit(step=self._step, data=self._data, parts=self._checksums, layout=dict(layout), host=dict(host)).write(
            self._directory
        )
