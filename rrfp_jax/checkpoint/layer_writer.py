"""A step whose parameters come from elsewhere: written layer by layer, so that no model is ever held."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.checkpoint.arrays import PARAMS, HostArray
from rrfp_jax.checkpoint.durable_files import sync_directory
from rrfp_jax.checkpoint.ownership import Part, part_name
from rrfp_jax.checkpoint.part_writer import PartWriter
from rrfp_jax.checkpoint.record import Commit, step_directory


class LayerWriter:
    """Writes the parameters of a model as a step that has no optimizer state; every layer is a part of its own.

    Args:
        root: the folder of the checkpoints; made where it is missing.
        step: how many steps the parameters have been trained here.

    Nothing counts before :meth:`commit`.
    """

    def __init__(self, root: Path, step: int = 0) -> None:
        self._step, self._directory = step, step_directory(root.absolute(), step)
        self._data = f"data-{secrets.token_hex(4)}"
        (self._directory / self._data).mkdir(parents=True)
        self._checksums: dict[str, str] = {}

    def write(self, layer: str, arrays: Mapping[tuple[str, ...], np.ndarray]) -> None:
        """Write a layer, whose arrays come by their way inside it. Raises whatever the file system raises."""
        part = Part(name=part_name(layer), layers=(layer,), ranks=(0,))
        folder = self._directory / self._data
        held = {(layer, PARAMS, *way): _whole(array) for way, array in arrays.items()}
        writer = PartWriter(0, [part], [0])
        try:
            writer.write(folder, held)
            self._checksums |= writer.finish(folder, held)
        finally:
            writer.close()

    def commit(self, host: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
        """Make it count, with plain data beside the arrays."""
        sync_directory(self._directory / self._data)
        Commit(step=self._step, data=self._data, parts=self._checksums, layout=dict(layout), host=dict(host)).write(
            self._directory
        )


def _whole(array: np.ndarray) -> HostArray:
    everything = (slice(None),) * array.ndim
    return HostArray(array.shape, array.dtype, array.shape, ((everything, array),))
