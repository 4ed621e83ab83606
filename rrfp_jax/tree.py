"""The tree along which a run's control messages travel, over places 0 to n - 1 with place 0 as the root.

With degree d the children of place i are ``d * i + 1`` to ``d * i + d``, as in a heap. So every place computes its
neighbours from its own number, has at most d + 1 of them, and a message passes at most log_d(n) places each way.
"""

CONTROL_DEGREE = 4
"""The largest number of children of a place: a wider tree is less deep, and busier at each place."""


def parent(place: int, degree: int = CONTROL_DEGREE) -> int | None:
    """Returns the place above; None for 0, the root."""
    return (place - 1) // degree if place else None


def children(place: int, num_places: int, degree: int = CONTROL_DEGREE) -> range:
    """Returns the places right below, ascending."""
    first = degree * place + 1
    return range(min(first, num_places), min(first + degree, num_places))


def neighbours(place: int, num_places: int, degree: int = CONTROL_DEGREE) -> tuple[int, ...]:
    """Returns the place above, if there is one, and the places right below."""
    above = parent(place, degree)
    return (*(() if above is None else (above,)), *children(place, num_places, degree))
