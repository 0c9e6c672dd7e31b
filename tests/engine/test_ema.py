"""Averaged weights against their formula, through a resume, an evaluation and every reader of a checkpoint."""

import json
import math

import pytest
import torch
from torch import nn

from tests.training.tiny import documents, log, losses, stop_at, train, weights
from unmask import load
from unmask.engine.ema import Ema
from unmask.errors import UserError
from unmask.evaluation import evaluate
from unmask.export import export


def averages(history, decay):
    """From the weights before and after every update: the formula, in fp64."""
    average = history[0].double()
    for step, after in enumerate(history[1:]):
        share = min(decay, (1 + step) / (10 + step))
        average = share * average + (1 - share) * after.double()
    return average


@pytest.mark.parametrize("dtype, kept", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")])
def test_it_is_its_formula_in_fp32_at_least(dtype, kept):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(getattr(torch, dtype))
    ema = Ema(model, 0.3)
    history = [model.weight.detach().clone()]
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3).to(model.weight.dtype))
        history.append(model.weight.detach().clone())
        ema.update(step)
    assert ema.average["weight"].dtype == getattr(torch, kept)
    tolerance = 1e-12 if kept == "float64" else 1e-6
    torch.testing.assert_close(ema.average["weight"].double(), averages(history, 0.3), rtol=tolerance, atol=tolerance)


def test_the_model_holds_the_averages_only_inside_the_block():
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.9)
    before = model.weight.detach().clone()
    ema.average["weight"].fill_(7.0)
    with pytest.raises(RuntimeError, match="over"), ema.applied():
        assert (model.weight == 7).all()
        raise RuntimeError("over")
    assert torch.equal(model.weight, before)


def test_a_run_averages_what_it_trains(tmp_path):
    history = []

    def remember(trainer, record):
        history.append(weights(trainer))

    trainer = train(tmp_path, "training.ema=0.6", "model.dtype=float64", callbacks=[remember])
    start = train(tmp_path / "start", "training.steps=1", "model.dtype=float64", "optimizer.learning_rate=1e-300")
    for name, average in trainer.engine.ema.average.items():
        expected = averages([weights(start)[name], *(each[name] for each in history)], 0.6)
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=1e-12)


def test_it_resumes_bit_for_bit_and_a_skipped_update_changes_nothing(tmp_path):
    options = ["training.ema=0.9", "training.steps=6"]
    whole = train(tmp_path / "whole", *options)
    train(tmp_path / "halves", *options, callbacks=[stop_at(3)])
    rest = train(tmp_path / "halves", *options)
    for name, average in whole.engine.ema.average.items():
        assert torch.equal(average, rest.engine.ema.average[name]), name
        assert not torch.equal(average, weights(whole)[name])


def test_switched_on_later_it_starts_from_the_weights(tmp_path):
    first = train(tmp_path, "training.steps=2")
    rest = train(tmp_path, "training.steps=3", "training.ema=0.5")
    for name, average in rest.engine.ema.average.items():
        share = min(0.5, 3 / 12)
        expected = share * weights(first)[name] + (1 - share) * weights(rest)[name]
        torch.testing.assert_close(average, expected)


def test_readers_take_the_average_when_asked(tmp_path):
    trainer = train(tmp_path / "run", "training.ema=0.9", "training.steps=4")
    plain, averaged = load(tmp_path / "run").model, load(tmp_path / "run" / "ema").model
    for name, parameter in averaged.named_parameters():
        assert torch.equal(parameter, trainer.engine.ema.average[name])
        assert torch.equal(plain.get_parameter(name), weights(trainer)[name])
    export(tmp_path / "run" / "ema", tmp_path / "hf")
    exported = load(tmp_path / "hf").model
    assert all(
        torch.equal(exported.get_parameter(name), average) for name, average in trainer.engine.ema.average.items()
    )
    with pytest.raises(UserError, match="exported model has no EMA weights"):
        load(tmp_path / "hf" / "ema")


def test_a_run_without_averages_says_so(tmp_path):
    train(tmp_path, "training.steps=1")
    with pytest.raises(UserError, match="step-00000001: holds no EMA weights: .*training.ema=0"):
        load(tmp_path / "ema")


def test_evaluation_during_training_takes_the_averages_unless_told_not_to(tmp_path):
    held_out = documents(6, seed=1)
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in held_out))
    options = ["training.ema=0.9", "optimizer.learning_rate=0.05", "evaluation.packs=0"]
    bounds = {}
    for ema in (True, False):
        trainer = train(tmp_path / str(ema), *options, f"evaluation.ema={ema}", validation=str(file))
        record = log(tmp_path / str(ema))[-1]
        assert record.get("ema", False) == ema
        bounds[ema] = record["nats_per_token"]
        run = tmp_path / str(ema)
        found = evaluate(run / "ema" if ema else run, file, pack_tokens=128)
        assert found.bound.nats_per_token == pytest.approx(bounds[ema], rel=1e-6)
        assert not math.isnan(trainer.summary.validation.standard_error)
    assert abs(bounds[True] - bounds[False]) > 1e-3
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
