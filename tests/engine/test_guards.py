"""Three bad steps in a row end a run; an overflow of the loss scale is none."""

import json
import math
import sys
from unittest import mock

import pytest

from tests.training.tiny import config, documents, train
from unmask.cli import main
from unmask.engine.engine import Engine
from unmask.engine.guards import FiniteGuard
from unmask.errors import UserError
from unmask.runs.folder import saved_steps


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


@pytest.mark.parametrize(("scale", "patience"), [(2.0**40, 20), (2.0, 2)])
def test_overflows_end_a_run_when_no_scale_mends_them(scale, patience):
    guard = FiniteGuard()
    for step in range(1, patience):
        assert not guard.allows(1.0, math.nan, overflow_is_scale=True)
        guard.check(step, 1.0, math.nan, [7], scale / 2**step)
    guard = FiniteGuard(guard.streak, guard.overflows)  # as a resumed run has it
    guard.allows(1.0, math.nan, overflow_is_scale=True)
    with pytest.raises(UserError, match=f"the gradient norm is nan in fp16, {patience} steps in a row, whatever"):
        guard.check(patience, 1.0, math.nan, [7], scale / 2**patience)


def test_a_good_step_begins_the_count_of_overflows_anew():
    guard = FiniteGuard()
    for step in range(60):
        guard.allows(1.0, 1.0 if step % 20 == 19 else math.inf, overflow_is_scale=True)
        guard.check(step, 1.0, math.inf, [7], 2.0)
    assert guard.overflows == 0


def test_a_gradient_in_fp16_that_is_never_finite_ends_the_run(tmp_path):
    def poisoned(engine, objective, micro):
        losses = forward(engine, objective, micro)
        next(engine.model.parameters()).grad.view(-1)[0] = math.nan
        return losses

    forward = Engine.forward_backward
    with mock.patch.object(Engine, "forward_backward", poisoned), pytest.raises(UserError) as told:
        train(tmp_path, "training.precision=fp16", "training.steps=60")
    # 2^16 halved 17 times is below 1.
    assert "step 17: the gradient norm is nan in fp16, 17 steps in a row" in str(told.value)
    assert "the loss scale, now 0.5" in str(told.value) and "training.precision=bf16" in str(told.value)
    assert saved_steps(tmp_path) == []


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
