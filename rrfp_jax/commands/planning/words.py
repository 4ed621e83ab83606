"""Choices and figures of a plan as people write them."""

from rrfp_jax.arbitration import READY, STRICT, Ordering
from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.planning.search.records import Choice, Ranked, Shape

SEARCHED = "searched"


def shape_in_words(shape: Shape) -> str:
    """``8 x 2 x 1``: stages, replicas, devices that share a layer; and other axes, ``8 x 2 x 1 x fsdp 4``."""
    return " x ".join([f"{shape.num_stages} x {shape.data} x {shape.tensor}", *(f"{a} {n}" for a, n in shape.mesh)])


def microbatches_in_words(shape: Shape) -> str:
    """``32 of 4``: microbatches of a replica, and samples of each."""
    return f"{shape.num_microbatches} of {shape.microbatch_size}"


def order_in_words(choice: Choice) -> str:
    """``zb-h1 strict``, ``1f1b with foresight``, ``bfw, window 8``."""
    return f"{choice.order_name} {consumption_in_words(choice.ordering)}".strip() + _bounds(choice)


def consumption_in_words(ordering: Ordering) -> str:
    """How a table is consumed; nothing without one."""
    if ordering.schedule is None or not ordering.follows_table:
        return ""
    if ordering.consume == STRICT:
        return STRICT
    return READY if ordering.foresight is False else "with foresight"


def _bounds(choice: Choice) -> str:
    ordering, found = choice.ordering, ""
    if ordering.window is not None and choice.offload is None:
        windows = (ordering.window,) if isinstance(ordering.window, int | str) else ordering.window
        found += f", window {','.join(map(str, dict.fromkeys(windows) if len(set(windows)) == 1 else windows))}"
    if ordering.footprint is False and ordering.is_guided:
        found += ", no footprint"
    return found + (f", offload {choice.offload}" if choice.offload is not None else "")


def step_in_words(ranked: Ranked) -> str:
    """``1,229.1 ± 0.3``: milliseconds, with the standard error where there is one."""
    step_ms, error_ms = ranked.forecast.step_ms, ranked.forecast.error_ms
    error = f"{error_ms:.1g}" if error_ms < 10 else f"{error_ms:,.0f}"
    return f"{milliseconds(step_ms)} ± {error}" if error_ms else milliseconds(step_ms)


def milliseconds(value: float) -> str:
    """With as many digits as four significant ones need, and at most three behind the point."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"


def bytes_or_dash(num_bytes: int) -> str:
    """A size; a dash for none."""
    return format_bytes(num_bytes) if num_bytes else "-"


def rate(value: float | None) -> str:
    """Per second; nothing where it is not known."""
    return "" if not value else f"{value:,.0f}" if value >= 10 else f"{value:,.2f}"


def share(value: float | None) -> str:
    """In percent; nothing where it is not known."""
    return "" if value is None else f"{value:.1%}"
