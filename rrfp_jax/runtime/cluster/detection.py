"""Rank and number of ranks as JAX detects them from SLURM, Kubernetes or Open MPI.

JAX keeps what it knows about these environments in ``jax._src.clusters``, without a public name: its own
``jax.distributed.initialize`` is the only user, which would also start the coordination service in rank 0.
"""


def detect_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process.

    Raises:
        ValueError: where JAX knows no environment that this process runs in, or it is misconfigured.
    """
    from jax._src.clusters import ClusterEnv

    known = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    for kind in known:
        if kind.is_env_present():
            try:
                return int(kind.get_process_id()), int(kind.get_process_count())
            except Exception as error:  # Kubernetes' client has errors of its own
                raise ValueError(
                    f"{kind.name or kind.__name__} was detected, but does not tell the rank: {error}"
                ) from error
    names = ", ".join(kind.name or kind.__name__ for kind in known)
    raise ValueError(
        f"detection is on, but JAX finds no cluster environment around this process (it knows {names}): set RRFP_RANK "
        "and RRFP_NUM_RANKS, or turn detection off"
    )
