"""A rank of ``rrfp train`` whose environment has one flag of XLA and one setting of JAX more, if it is not rank 0."""

import os
import sys

from rrfp_jax.cluster.config import RANK
from rrfp_jax.commands.main import main

FLAG = "--xla_cpu_enable_fast_math=true"

if __name__ == "__main__":
    if os.environ[RANK] != "0":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
        os.environ["JAX_THREEFRY_PARTITIONABLE"] = "0"
    sys.argv[1:1] = ["train"]
    main()
