"""What is lost on average where a candidate is left behind that may be better than its draws say.

How far it is behind is known with an error, and so is the error itself: few draws that happen to agree seem to be sure.
So each error is drawn towards those of the others that are compared (a moderated t-statistic: Smyth, *Statistical
Applications in Genetics and Molecular Biology* 3, 2004).
"""

from collections.abc import Sequence
from statistics import NormalDist, fmean

_PRIOR = 4
"""For how many draws the errors of the others count."""
_NORMAL = NormalDist()


def expected_loss(behind: float, error: float) -> float:
    """Of what lies ``behind`` by as much: the mean of by how much it is ahead, 0 where it is not.

    It is the expected opportunity cost of a normal distribution with this standard error.
    """
    if not error:
        return max(0.0, -behind)
    z = behind / error
    return error * (_NORMAL.pdf(z) - z * _NORMAL.cdf(-z))


def moderated(error: float, errors: Sequence[float], num_draws: int) -> float:
    """A standard error over so many draws, at least 2, given those of all that are compared; larger where it rests on
    few draws, as Student's distribution is wider."""
    own, prior = num_draws - 1, fmean(each**2 for each in errors)
    degrees = own + _PRIOR
    variance = (own * error**2 + _PRIOR * prior) / degrees
    return float((variance * degrees / (degrees - 2)) ** 0.5)
