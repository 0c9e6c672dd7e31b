import numpy as np
import pytest

from tests.objectives.support import bound, document
from unmask.objectives.clip import FULL, best_clip, scored_blocks


def test_the_quiet_window_is_found():
    random = np.random.default_rng(0)
    level = np.arange(1, 2001) / 2000
    quiet = (level >= 0.3) & (level <= 0.8)
    loss = np.where(quiet, 2.0 + 0.01 * random.standard_normal(2000), 2.0 + 3.0 * random.standard_normal(2000))
    assert best_clip(level, loss) == pytest.approx((0.3, 0.8))


def test_the_choice_is_the_smallest_variance_over_all_windows():
    random = np.random.default_rng(3)
    level = random.random(300)
    loss = random.standard_normal(300) * (0.2 + np.abs(level - 0.6))
    best = best_clip(level, loss)
    windows = [(s / 100, (s + w) / 100) for w in range(50, 95, 5) for s in range(0, 101 - w, 5)]
    variances = {window: loss[(level >= window[0]) & (level <= window[1])].var(ddof=1) for window in windows}
    low, high = min(variances, key=variances.get)
    assert best == pytest.approx((max(low, 1e-3), high))
    assert 0.5 - 1e-9 <= high - low <= 0.9 + 1e-9


def test_too_few_samples_choose_the_full_window():
    assert best_clip(np.array([0.5]), np.array([1.0])) == FULL
    assert best_clip(np.empty(0), np.empty(0)) == FULL


def test_scored_blocks_recover_level_and_loss_of_every_block():
    objective = bound("block_diffusion", block_size=4, draws=2).evaluation()
    rows = objective.rows([document(10, sample=5, prompt=3)], seed=1)
    nll = np.random.default_rng(0).random(len(rows.labelled))
    level, loss, scored = scored_blocks(rows, nll)
    starts, sizes = rows.blocks()
    assert len(level) == len(starts) == 6  # blocks [0,4), [4,8), [8,10), twice
    place = dict(zip(rows.labelled.tolist(), nll, strict=True))
    for block, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        n = sum(rows.position[row] >= 3 for row in range(start, start + size))
        masked = [row for row in range(start, start + size) if row in place]
        assert scored[block] == pytest.approx(n)
        assert level[block] == pytest.approx(len(masked) / n)
        assert loss[block] == pytest.approx(sum(place[row] for row in masked) / len(masked))


def test_reclip_moves_an_automatic_window_only():
    level, loss = np.arange(1, 101) / 100, np.where(np.arange(1, 101) > 50, 1.0, np.arange(100.0))
    automatic = bound("block_diffusion", clip="auto")
    assert automatic.span == FULL
    moved = automatic.reclip(level, loss)
    assert moved.span == best_clip(level, loss) != FULL
    assert automatic.window is None
    assert type(moved)(**moved.model_dump(mode="json"), mask_token_id=0) == moved
    fixed = bound("block_diffusion", clip=(0.2, 0.7))
    assert fixed.reclip(level, loss) is fixed
    assert bound("mdlm").reclip(level, loss).model_dump() == bound("mdlm").model_dump()
