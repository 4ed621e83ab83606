"""Every private name of Orbax does what we rely on."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers

from rrfp_jax.private.orbax_names import ORBAX_NAMES, TENSORSTORE_SETTINGS, build_array_write_spec
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


def unlock() -> None:
    TENSORSTORE_SETTINGS["file_io_locking"] = {"mode": "none"}
    try:
        context = type_handlers.get_ts_context(use_ocdbt=True)
    finally:
        del TENSORSTORE_SETTINGS["file_io_locking"]
    assert "none" in repr(context["file_io_locking"]), "later contexts take what the settings say"


CANARIES = {"build_array_write_spec": build, "_DEFAULT_OCDBT_TS_CONTEXT": unlock}


@pytest.mark.parametrize("name", ORBAX_NAMES)
def test_it_is_as_we_use_it(name: str):
    assert_kept("orbax-checkpoint", ORBAX_NAMES, CANARIES, name)
