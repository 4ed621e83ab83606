"""Who watches whom, beside those who exchange messages: a graph along which also losses are told on.

Ranks stand in a circle; each watches the next and the previous one, and those ``stride`` places ahead and behind, where
``stride`` is about the square root of their number. So nobody has more than four neighbours, and news passes at most
about ``stride`` of them.

**Any three ranks may vanish at once, and the others still hear of each other.** The graph looks the same from every
rank, and is connected, since the circle is. Such a graph of degree d stays connected however one removes fewer than
2 (d + 1) / 3 of its places (Watkins 1970), here fewer than 10 / 3. Up to five ranks all watch each other.

**One host may vanish, however many ranks it has**, where these are consecutive: what is left of the circle is a path.
So may two hosts with fewer than ``stride`` ranks each: the strides lead over either gap.
"""

import math

_ALL = 5


def watched(rank: int, num_ranks: int) -> frozenset[int]:
    """The ranks that ``rank`` watches, which are also those that watch it."""
    if num_ranks <= _ALL:
        return frozenset(range(num_ranks)) - {rank}
    stride = round(math.sqrt(num_ranks))
    return frozenset((rank + step) % num_ranks for step in (1, -1, stride, -stride))
