"""Which scheme of a menu each matrix gets under a budget of bits: the least sum of losses, by steps of falling gain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from w4conv.scheme import int8, scheme_of

MENU: Final = (  # by rising size
    *(scheme_of("nl3", size) for size in (64, 32, 16)),
    *(scheme_of("nl4", size) for size in (128, 64, 32, 16)),
    int8(128),
)
_DIGITS: Final = 6  # to which losses are told apart, so that the last bits of a sum decide nothing


@dataclass(frozen=True, slots=True)
class Item:
    """A matrix. nbytes, losses: with each scheme that it may have, by rising size."""

    name: str
    nbytes: tuple[int, ...]
    losses: tuple[float, ...]


def allocate(items: Sequence[Item], budget: int) -> dict[str, int]:
    """Place in its menu for each item, all together within `budget` bytes, which holds the smallest of each.

    Each item climbs the lower convex hull of its losses over bytes. Steps are taken by falling loss per byte, the first
    item first among equals; one that no longer fits ends the climb of its item. So the result is the optimum but for
    what is left of the budget, which is less than one step.
    """
    chosen = {item.name: 0 for item in items}
    left = budget - sum(item.nbytes[0] for item in items)
    if left < 0:
        raise ValueError("the budget does not hold the smallest schemes")
    steps = []
    for order, item in enumerate(items):
        hull = _hull(item)
        for level, (a, b) in enumerate(itertools.pairwise(hull)):
            gain = (item.losses[a] - item.losses[b]) / (item.nbytes[b] - item.nbytes[a])
            steps.append((-float(f"{gain:.{_DIGITS}g}"), order, level, a, b))
    for _, order, _, a, b in sorted(steps):
        item = items[order]
        if chosen[item.name] == a and (more := item.nbytes[b] - item.nbytes[a]) <= left:
            chosen[item.name] = b
            left -= more
    return chosen


def _hull(item: Item) -> list[int]:
    """Places on the lower convex hull, from the smallest on, as long as the loss falls."""
    hull = [0]
    while True:
        here = hull[-1]
        further = [
            ((item.losses[i] - item.losses[here]) / (item.nbytes[i] - item.nbytes[here]), -i)
            for i in range(here + 1, len(item.nbytes))
            if item.nbytes[i] > item.nbytes[here]
        ]
        if not further or min(further)[0] >= 0:
            return hull
        hull.append(-min(further)[1])
