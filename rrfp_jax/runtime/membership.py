"""The rank of this process, from the environment that its launcher made, or as JAX detects it."""

from collections.abc import Mapping

from rrfp_jax.cluster.config import (
    ATTEMPT,
    COORDINATOR,
    DETECT,
    INTERFACE,
    NUM_RANKS,
    RANK,
    RENDEZVOUS,
    Membership,
)

_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")


def membership_from(environ: Mapping[str, str]) -> Membership | None:
    """Returns this process's place, or None if nothing says that it is one of several.

    With ``RRFP_DETECT=1`` JAX tells the rank and the number of ranks, if ``RRFP_RANK`` does not. Raises ValueError if
    the environment is incomplete or malformed, or JAX detects nothing.
    """
    text = environ.get(DETECT, "").lower()
    if text not in (*_YES, *_NO):
        raise ValueError(f"{DETECT} is '{text}': give 1 or 0")
    detect = text in _YES
    if RANK not in environ and not detect:
        if stray := [name for name in (NUM_RANKS, RENDEZVOUS, COORDINATOR) if name in environ]:
            raise ValueError(f"{' and '.join(stray)} set but not {RANK}: set it too, or {DETECT}=1")
        return None
    if RANK in environ:
        rank, num_ranks = _number(environ, RANK), _number(environ, NUM_RANKS)
    else:
        rank, num_ranks = _detect()
    return Membership(
        rank=rank,
        num_ranks=num_ranks,
        rendezvous=_text(environ, RENDEZVOUS),
        coordinator=_text(environ, COORDINATOR),
        attempt=_number(environ, ATTEMPT) if ATTEMPT in environ else 0,
        interface=environ.get(INTERFACE) or None,
    )


def _detect() -> tuple[int, int]:
    """Returns rank and number of ranks as JAX detects them from SLURM, Kubernetes or Open MPI. Raises ValueError if it
    detects nothing."""
    # JAX's own jax.distributed.initialize, the only public user of this, would also start the service in rank 0
    from rrfp_jax.private.jax_names import ClusterEnv

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


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(
            f"this process is one of several, but {name} is not set: start it with rrfp launch, or "
            "give it the value that the supervisor prints"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} is '{text}': give a number")
    return int(text)
