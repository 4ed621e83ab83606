"""Compiles DeepSeek-V3, whole or with fewer layers, for accelerators that need not be here, and tells time and memory.

Each layer is a chunk, and the chunks are dealt out to the stages in turn. So programs are as many as there are unlike
layers, whatever their number. The compiler for the device must be installed.
"""

import argparse
import os
import time
from dataclasses import replace

import jax
import numpy as np
import optax

from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.layout import Layout
from rrfp_jax.models import language_model
from rrfp_jax.models.presets import DECODERS
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement


def main() -> None:
    """Prints a line for the model with this number of layers on this number of stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-layers", type=int, default=61)
    parser.add_argument("--num-stages", type=int, default=16)
    parser.add_argument("--experts-over", type=int, default=32, help="devices of a stage")
    parser.add_argument("--device", default="h100")
    given = parser.parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    use_cpu(1)
    whole = DECODERS["deepseek-v3"]
    assert whole.experts is not None
    experts = replace(whole.experts, capacity_factor=1.25)
    began = time.perf_counter()
    chunks = language_model(replace(whole, num_layers=given.num_layers, experts=experts)).split(given.num_layers)
    layout = Layout(num_stages=given.num_stages, mesh={"expert": given.experts_over})
    pipeline = Pipeline(
        chunks,
        placement=Placement(tuple(chunk % given.num_stages for chunk in range(given.num_layers))),
        optimizer=optax.adamw(1e-4),
        process=Process.compile_only(layout, given.device),
        remat="full",
    )
    shape = given.experts_over, 4096
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    compiled = pipeline.compile_only([leaves], num_microbatches=64)
    took = time.perf_counter() - began
    programs = {id(each) for chunk in compiled.programs.chunks.values() for each in chunk.compiled.values()}
    lasting, peak = (max(getattr(stage, name) for stage in compiled.forecast) for name in ("fixed", "peak"))
    print(
        f"{given.num_layers} layers, {given.num_stages} stages: {len(programs)} programs traced and compiled in "
        f"{took:.0f} s; the fullest device holds {format_bytes(lasting)} all the time, {format_bytes(peak)} at most"
    )


if __name__ == "__main__":
    main()
