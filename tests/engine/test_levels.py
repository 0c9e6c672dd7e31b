"""The loss by noise level: levels counted by hand, and sums that add up to the loss's own nll."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.training.tiny import log, stop_at, train
from unmask.engine.observe import NOISE_LEVEL, LevelLosses, masked_share
from unmask.objectives import LossTerms, build
from unmask.objectives.levels import bin_of
from unmask.rows import Document

MASK = 63


def document(length, prompt=0, sample=0):
    return Document(np.arange(length) % 60, np.arange(length) >= prompt, sample)


@pytest.mark.parametrize(
    "name, options",
    [
        ("block_diffusion", {"block_size": 4, "draws": 2}),
        ("block_diffusion", {"block_size": "full"}),
        ("mdlm", {}),
        ("mdlm", {"variant": "dream"}),
        ("fast_dllm_v2", {"block_size": 4}),
    ],
)
def test_a_level_is_the_share_of_supervised_tokens_that_are_masked(name, options):
    """Counted token by token, over packed documents with prompts."""
    objective = build(name, options).model_copy(update={"mask_token_id": MASK})
    pack = [document(13, prompt=3, sample=1), document(7, sample=2), document(9, prompt=6, sample=3)]
    rows = objective.rows(pack, 0).pruned()
    level = masked_share(rows, pack, MASK)
    assert np.isnan(level[: rows.clean]).all()
    for start, size in zip(*rows.blocks(), strict=True):
        block = range(start, start + size)
        supervised = [pack[rows.document[row]].supervised[rows.position[row]] for row in block]
        masked = [rows.token[row] == MASK for row in block]
        assert np.allclose(level[start : start + size], sum(masked) / max(sum(supervised), 1))
    assert np.nanmax(level) <= 1


def test_bins_are_closed_above():
    assert bin_of(np.array([0.1, 0.2, 0.2001, 0.6, 1.0, np.nan]), 5).tolist() == [0, 0, 1, 2, 4, 5]


def test_means_by_hand():
    losses = LevelLosses(2)
    losses.begin([])
    assert losses.sums() == [0.0] * 4
    for place, nll in (([0, 1, 1], [1.0, 2.0, 4.0]), ([2, 0], [9.0, 3.0])):  # the 2 is no level's
        batch = SimpleNamespace(columns={NOISE_LEVEL: torch.tensor(place)})
        losses.see(0, batch, LossTerms(torch.tensor(0.0), 1.0, {}, torch.tensor(nll)))
    found = losses.sums()
    assert found == [4.0, 6.0, 2.0, 2.0]
    losses.take(found)
    losses.take([2.0, 0.0, 2.0, 0.0])
    assert losses.read() == {"nll/0.00-0.50": 1.5, "nll/0.50-1.00": 3.0}
    assert losses.read() == {}


@pytest.mark.parametrize("objective", [{"name": "mdlm"}, {"name": "block_diffusion", "block_size": 8}])
def test_the_bins_of_a_step_make_up_its_nll(tmp_path, monkeypatch, objective):
    """Of one step, the mean of the bins weighted by their rows is the nll."""
    sums = []
    take = LevelLosses.take

    def seen(self, found):
        sums.append(found)
        take(self, found)

    monkeypatch.setattr(LevelLosses, "take", seen)
    train(tmp_path, "training.steps=3", "log.levels=4", objective=objective)
    for record, found in zip(log(tmp_path), sums, strict=True):
        nll, labelled = np.array(found[:4]), np.array(found[4:])
        assert nll.sum() / labelled.sum() == pytest.approx(record["nll"], rel=1e-6)
        bins = [record[key] for key in record if key.startswith("nll/")]
        assert bins == pytest.approx((nll / np.maximum(labelled, 1))[labelled > 0].tolist())


def test_an_objective_without_noise_has_no_levels(tmp_path):
    train(tmp_path / "ar", objective={"name": "ar"})
    train(tmp_path / "off", "log.levels=0")
    for name in ("ar", "off"):
        assert not any(key.startswith("nll/") for record in log(tmp_path / name) for key in record)


def test_what_a_line_sums_up_survives_a_stop_between_two_lines(tmp_path):
    options = ["training.steps=6", "log.every=3"]
    train(tmp_path / "whole", *options)
    train(tmp_path / "halves", *options, callbacks=[stop_at(2)])
    train(tmp_path / "halves", *options)
    found = [[{k: v for k, v in r.items() if k.startswith("nll/")} for r in log(tmp_path / n)]
             for n in ("whole", "halves")]  # fmt: skip
    assert found[0] == found[1] and len(found[0]) == 2
