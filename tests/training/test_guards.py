"""Three bad steps in a row end a run; an overflow of the loss scale is none."""

import json
import math
import sys
from unittest import mock

import pytest

from tests.training.tiny import config, documents
from unmask.cli import main
from unmask.errors import UserError
from unmask.models.checkpoints import saved_steps
from unmask.training.guards import FiniteGuard


def test_two_bad_steps_are_forgiven_and_three_name_step_and_samples():
    guard = FiniteGuard()
    for loss, norm in [(math.nan, 1.0), (1.0, math.inf), (1.0, 1.0), (math.inf, 1.0), (math.nan, math.nan)]:
        guard.allows(loss, norm)
        guard.check(1, loss, norm, [7])
    assert guard.streak == 2
    assert not guard.allows(math.nan, 1.0)
    with pytest.raises(UserError, match=r"step 6: the loss is nan, 3 steps in a row \(samples 7, 9\)"):
        guard.check(6, math.nan, 1.0, [7, 9])


def test_an_infinite_gradient_under_loss_scaling_is_skipped_but_not_counted():
    guard = FiniteGuard()
    assert not guard.allows(1.0, math.inf, overflow_is_scale=True)
    assert guard.streak == 0
    assert not guard.allows(math.inf, math.inf, overflow_is_scale=True)
    assert guard.streak == 1


def test_a_model_that_diverges_ends_the_command_with_code_2(tmp_path, capsys):
    """A learning rate that overflows everything: the checkpoint from before it, and the documents, are named."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in documents()))
    options = ["optimizer.learning_rate=1e38", "training.steps=9", "checkpoint.every=1", "checkpoint.keep=0"]
    settings = config(tmp_path / "run", f"data.train={data}", *options)
    (tmp_path / "run.yaml").write_text(settings.dump())
    with mock.patch.object(sys, "argv", ["unmask", "train", str(tmp_path / "run.yaml")]):
        with pytest.raises(SystemExit) as exit:
            main()
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1
    assert "3 steps in a row (samples " in said and "optimizer.learning_rate" in said
    assert saved_steps(tmp_path / "run")[0] == 1
