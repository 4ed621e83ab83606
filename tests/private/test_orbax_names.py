"""Every private name of Orbax does what we rely on."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers

from rrfp_jax.private.orbax_names import NAMES, build_array_write_spec
from tests.private.canaries import assert_kept


def build() -> None:
    info = type_handlers.ParamInfo(name="a", parent_dir=Path("/folder"), is_ocdbt_checkpoint=True)
    store = build_array_write_spec(
        info,
        ocp.SaveArgs(),
        global_shape=(4, 2),
        local_shape=(2, 2),
        dtype=np.dtype("float32"),
        use_ocdbt=True,
        process_index=3,
    ).json["kvstore"]
    assert store["driver"] == "ocdbt"
    assert "ocdbt.process_3" in str(store["base"]), "a process writes into a folder of its own"
    assert "path" in store, "which part_writer replaces"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_we_use_it(name: str):
    assert_kept("orbax-checkpoint", NAMES, {"build_array_write_spec": build}, name)
