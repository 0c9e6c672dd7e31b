"""Dividing work over ranks: zigzag for rows in order, longest-first with exchanges for separate items.

Zigzag cuts the rows into 2P segments and gives rank r segments r and 2P-1-r. Where the cost of a row grows linearly
along the sequence (every causal mask) a mirrored pair costs the same per row wherever it lies, so any split into
mirrored segments balances rows and pairs at once, also for ranks of unequal speed.
"""

from __future__ import annotations

import heapq

import numpy as np

#: How much longer than the best found the slowest rank may take for the sake of nearness and of long runs of rows.
SLACK = 1.02

#: Exchanges made at most after the first deal; ranks of at most so many items exchange two at a time.
EXCHANGES, PAIRED = 400, 64

#: Up to FEW items are assigned again, RESTARTS times at most, until the slowest rank is CLOSE to the mean.
FEW, RESTARTS, CLOSE = 256, 10, 1.01


def zigzag(n: int, ranks: int, speeds: np.ndarray | None = None, grid: int = 1) -> np.ndarray:
    """Owner of n consecutive items in 2 * ranks mirrored segments, int64 [n].

    speeds: float64 [ranks], the share of each (default equal); grid: the inner bounds are multiples of it.
    """
    share = np.ones(ranks) if speeds is None else np.asarray(speeds, float)
    cumulative = np.r_[0.0, np.cumsum(share)] / (2 * share.sum())
    bounds = np.r_[cumulative, 1 - cumulative[-2::-1]] * n
    edge = np.floor(bounds / grid + 0.5).astype(np.int64) * grid
    edge[0], edge[-1] = 0, n
    edge = np.minimum(edge, n)
    segment = np.r_[np.arange(ranks), np.arange(ranks)[::-1]]
    return np.repeat(segment, np.diff(edge))


def balance(
    cost: np.ndarray, ranks: int, speeds: np.ndarray | None = None, load: np.ndarray | None = None
) -> np.ndarray:
    """Owner of every item, int64 [n], so that the slowest rank's time (load / speed) is small.

    cost: float64 [n]; load: float64 [ranks], what each rank has to do already. Deals are improved and the best is
    kept: longest first to the least loaded rank, rounds of one item a rank (which gives all ranks as many items) and,
    where a few items do not come out evenly, longest first after a little shaking (by a fixed seed).
    """
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, float)
    begin = np.zeros(ranks) if load is None else np.asarray(load, float)
    if len(cost) == 0:
        return np.empty(0, np.int64)
    deals = [_longest_first(cost, speed, begin), _in_rounds(cost, speed, begin)]
    improved = [evened(owner, cost, speed, begin) for owner in deals]
    best = min(improved, key=lambda owner: _score(owner, cost, speed, begin))
    chance = np.random.default_rng(0)
    for _ in range(RESTARTS if len(cost) <= FEW else 0):
        if times(best, cost, speed, begin).max() <= CLOSE * (begin.sum() + cost.sum()) / speed.sum():
            break
        deal = _longest_first(cost * chance.uniform(0.7, 1.3, len(cost)), speed, begin)
        best = min(best, evened(deal, cost, speed, begin), key=lambda owner: _score(owner, cost, speed, begin))
    return best


def first_balanced(candidates: list[np.ndarray], cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> np.ndarray:
    """The first candidate whose slowest rank takes at most SLACK times as long as the best's."""
    slowest = [times(owner, cost, speed, load).max() for owner in candidates]
    return next(owner for owner, time in zip(candidates, slowest, strict=True) if time <= SLACK * min(slowest))


def times(owner: np.ndarray, cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Time of every rank, float64 [ranks]."""
    return (load + np.bincount(owner, weights=cost, minlength=len(speed))) / speed


def _score(owner: np.ndarray, cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> tuple[float, float]:
    """The slowest time, rounded so that equal ones tie, then the largest number of items."""
    slowest = float(times(owner, cost, speed, load).max())
    unit = (load.sum() + cost.sum()) / speed.sum() or 1.0
    return round(slowest / unit, 4), float(np.bincount(owner, minlength=len(speed)).max())


def _longest_first(cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> np.ndarray:
    owner = np.zeros(len(cost), np.int64)
    heap = [(load[rank] / speed[rank], 0, rank) for rank in range(len(speed))]
    heapq.heapify(heap)
    for item in np.argsort(-cost, kind="stable").tolist():
        time, items, rank = heap[0]
        owner[item] = rank
        heapq.heapreplace(heap, (time + cost[item] / speed[rank], items + 1, rank))
    return owner


def _in_rounds(cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Largest items first, one to every rank a round, the largest of a round to the rank with the least time."""
    ranks = len(speed)
    owner = np.zeros(len(cost), np.int64)
    time = load / speed
    order = np.argsort(-cost, kind="stable")
    for first in range(0, len(order), ranks):
        items = order[first : first + ranks]
        chosen = np.argsort(time, kind="stable")[: len(items)]
        owner[items] = chosen
        time[chosen] += cost[items] / speed[chosen]
    return owner


def evened(owner: np.ndarray, cost: np.ndarray, speed: np.ndarray, load: np.ndarray) -> np.ndarray:
    """A deal after exchanges: the slowest rank's with another, while that makes the slower of the two faster."""
    owner = owner.copy()
    for _ in range(EXCHANGES):
        time = times(owner, cost, speed, load)
        slow = int(time.argmax())
        best = time[slow] * (1 - 1e-9)
        for fast in np.argsort(time, kind="stable").tolist():
            if fast == slow or time[fast] >= best:
                continue
            slower, given, taken = _best_exchange(owner, cost, (slow, fast), time, speed)
            if slower < best:
                owner[given], owner[taken] = fast, slow
                break
        else:
            return owner
    return owner


def _best_exchange(
    owner: np.ndarray, cost: np.ndarray, pair: tuple[int, int], time: np.ndarray, speed: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """(time of the slower of the two afterwards, items given, items taken): the best over up to two items each way."""
    slow, fast = pair
    given, taken = (_choices(np.flatnonzero(owner == rank), cost) for rank in pair)
    sums = [np.where(items >= 0, cost[items], 0.0).sum(1) for items in (given, taken)]
    order = np.argsort(sums[1], kind="stable")
    taken, other = taken[order], sums[1][order]
    ideal = (time[slow] - time[fast]) * speed[slow] * speed[fast] / (speed[slow] + speed[fast])
    near = np.searchsorted(other, sums[0] - ideal)
    partner = np.concatenate([np.clip(near + step, 0, len(other) - 1) for step in (-1, 0)])
    moved = np.r_[sums[0], sums[0]] - other[partner]
    after = np.maximum(time[slow] - moved / speed[slow], time[fast] + moved / speed[fast])
    best = int(after.argmin())
    mine, theirs = given[best % len(given)], taken[partner[best]]
    return float(after[best]), mine[mine >= 0], theirs[theirs >= 0]


def _choices(items: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Nothing, one item or (where there are few) two: int64 [choices, 2], -1 for nothing."""
    none = np.full((1, 2), -1)
    singles = np.stack([items, np.full_like(items, -1)], 1)
    if len(items) > PAIRED:
        return np.concatenate([none, singles])
    first, second = np.triu_indices(len(items), 1)
    return np.concatenate([none, singles, np.stack([items[first], items[second]], 1)])
