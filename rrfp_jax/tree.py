"""The tree along which a run's control messages travel: places 0 to n - 1, every one but 0 below a smaller one.

With degree d the children of place i are ``d * i + 1`` to ``d * i + d``, as in a heap. So every place works out its
neighbours from its own number, nobody has more than d + 1 of them, and a message passes at most log_d(n) places each
way.
"""

CONTROL_DEGREE = 4
"""How many children a place has at most: a wider tree is less deep, and busier at each place."""


def parent(place: int, degree: int = CONTROL_DEGREE) -> int | None:
    """The place above; None for 0, the root."""
    return (place - 1) // degree if place else None


def children(place: int, num_places: int, degree: int = CONTROL_DEGREE) -> range:
    """The places right below, ascending."""
    first = degree * place + 1
    return range(min(first, num_places), min(first + degree, num_places))


def neighbours(place: int, num_places: int, degree: int = CONTROL_DEGREE) -> tuple[int, ...]:
    """The place above, if any, and those right below."""
    above = parent(place, degree)
    return (*(() if above is None else (above,)), *children(place, num_places, degree))
