"""The words in which users say an order, and which of them contradict each other."""

from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.hints import BFW, HINTS, SCHEDULE, hint_by_name

READY = "ready"
STRICT = "strict"
SPLIT = "split"
FUSED = "fused"
DEFAULT_WINDOW = 32


def hint_names() -> tuple[str, ...]:
    """Everything that ``hint`` accepts."""
    return (*HINTS, SCHEDULE)


def check_read_ahead(read_ahead: int | None, consume: str) -> None:
    """Raise ValueError for a bound that admits nothing, or where nothing heeds it."""
    if read_ahead is not None and read_ahead < 1:
        raise ValueError(f"read_ahead is {read_ahead}: a chunk must be allowed at least 1 microbatch, or it never runs")
    if read_ahead is not None and consume == STRICT:
        raise ValueError(
            "read_ahead has no meaning under strict consumption, which goes as far ahead as its table does"
        )


def check_words(consume: str, hint: str | None, backward: str | None, *, has_schedule: bool) -> None:
    """Raise ValueError on words that mean nothing or contradict each other."""
    if consume not in (READY, STRICT):
        raise ValueError(f"consume {consume!r} is unknown: choose {READY} or {STRICT}")
    if backward not in (None, SPLIT, FUSED):
        raise ValueError(f"backward {backward!r} is unknown: choose {SPLIT} or {FUSED}")
    if hint not in (None, SCHEDULE):
        hint_by_name(hint)
    if consume == STRICT and not has_schedule:
        raise ValueError("consume strict needs a schedule to wait for: give one, for example 1f1b")
    if hint == SCHEDULE and not has_schedule:
        raise ValueError("hint schedule needs a schedule to rank by: give one, for example 1f1b")
    if hint == BFW.name and consume == READY and backward == FUSED:
        raise ValueError(f"hint {BFW.name} needs a split backward: leave backward out, or take hint bf")


def check_guidance(footprint: bool | None, foresight: ForesightRules | bool | None, *, is_guided: bool) -> None:
    """Raise ValueError where footprint or foresight are asked for and cannot mean anything."""
    for name, asked in (("footprint", footprint), ("foresight", foresight)):
        if asked and not is_guided:
            raise ValueError(
                f"{name} needs a schedule that ranks what is ready: give one, for example zb-h1, with consume {READY} "
                f"and no other hint, or leave {name} out"
            )
