"""Deterministic mode: switched on while a run lasts and back after it; two runs are the same bits."""

import os

import pytest
import torch

from tests.training.tiny import losses, train, weights
from unmask.training.determinism import WORKSPACE


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE[0]),
    )


def test_it_lasts_as_long_as_the_run(tmp_path):
    before, during = flags(), []
    train(tmp_path, "training.deterministic=true", callbacks=[lambda trainer, record: during.append(flags())])
    assert set(during) == {(True, False, False, WORKSPACE[1])}
    assert flags() == before == (False, False, False, None)


@pytest.mark.parametrize("objective", ["mdlm", "block_diffusion", "ar"])
def test_two_runs_are_the_same_bits(tmp_path, objective):
    options = ["training.deterministic=true", "training.steps=6", "training.precision=bf16", "training.batch_size=4"]
    runs = [train(tmp_path / name, *options, objective={"name": objective}) for name in ("one", "two")]
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    for name, weight in weights(runs[0]).items():
        assert torch.equal(weight, weights(runs[1])[name]), name


def test_an_operation_without_a_choice_is_an_error(tmp_path):
    """That the mode is on in earnest: torch itself refuses."""

    def refuse(trainer, record):
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
        refused.append(record["step"])

    refused = []
    train(tmp_path, "training.deterministic=true", "training.steps=1", callbacks=[refuse])
    assert refused == [1]
