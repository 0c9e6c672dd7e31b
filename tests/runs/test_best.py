"""The checkpoint of the lowest bound: saved when it is found, never forgotten, linked, and the same after a resume."""

import pytest

from tests.training.tiny import documents, log, stop_at, train, weights
from unmask import load
from unmask.errors import UserError
from unmask.evaluation.bound import Bound
from unmask.runs import folder as layout
from unmask.training import trainer as trainers

OPTIONS = ["checkpoint.best=true", "evaluation.every=1", "evaluation.packs=1", "checkpoint.keep=1"]


def bounds(monkeypatch, values):
    """Let the evaluation of step k find values[k]; returns the steps evaluated."""
    evaluated = []

    def evaluate(run, engine, objective, *others):
        evaluated.append(engine.step)
        return {"validation": Bound(values[engine.step], 0.1, 10, 2)}, objective

    monkeypatch.setattr(trainers, "evaluate", evaluate)
    return evaluated


def test_it_is_kept_and_linked(tmp_path, monkeypatch):
    bounds(monkeypatch, {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 9.0})
    seen = {}

    def remember(trainer, record):
        seen[record["step"]] = weights(trainer)

    trainer = train(tmp_path, *OPTIONS, "training.steps=5", validation=documents(4), callbacks=[remember])
    # Of step 1 no checkpoint is left, of step 2 the best, of step 5 the newest; the tie of step 4 changed nothing.
    assert layout.saved_steps(tmp_path) == [2, 5]
    assert (tmp_path / "best").readlink().name == "step-00000002"
    assert trainer.checkpoints.best == (2, 3.0)
    model = load(tmp_path / "best").model
    assert all((model.get_parameter(name) == weight).all() for name, weight in seen[2].items())
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="step-00000002/state.json: has 2 bytes"):
        load(tmp_path / "best")


def test_a_resumed_run_knows_it(tmp_path, monkeypatch):
    evaluated = bounds(monkeypatch, {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.5})
    train(tmp_path, *OPTIONS, validation=documents(4), callbacks=[stop_at(3)])
    assert (tmp_path / "best").readlink().name == "step-00000002"
    trainer = train(tmp_path, *OPTIONS, validation=documents(4))
    assert evaluated == [1, 2, 3, 4]  # that of step 3 was left to the resumed run
    assert trainer.checkpoints.best == (4, 2.5) and (tmp_path / "best").readlink().name == "step-00000004"


def test_a_run_that_goes_back_leaves_no_link_to_what_was_set_aside(tmp_path, monkeypatch):
    bounds(monkeypatch, {1: 5.0, 2: 4.0, 3: 3.0, 4: 6.0})
    options = [*OPTIONS[:3], "checkpoint.keep=0"]
    train(tmp_path, *options, validation=documents(4))
    assert (tmp_path / "best").readlink().name == "step-00000003"
    bounds(monkeypatch, {1: 5.0, 2: 4.0, 3: 7.0, 4: 6.0})
    train(tmp_path, *options, "checkpoint.step=2", validation=documents(4))
    assert (tmp_path / "best").readlink().name == "step-00000002"


def test_it_needs_an_evaluation(tmp_path):
    with pytest.raises(UserError, match="checkpoint.best goes by the likelihood bound: give data.validation"):
        train(tmp_path / "run", "checkpoint.best=true")
    train(tmp_path / "plain")
    with pytest.raises(UserError, match="best: no such checkpoint folder: the run keeps its best only with checkpoint"):
        load(tmp_path / "plain" / "best")


def test_several_sets_each_have_their_bound_and_the_first_decides(tmp_path):
    sets = {"near": documents(4), "far": documents(6, seed=7)}
    trainer = train(tmp_path, *OPTIONS, "evaluation.packs=0", "training.steps=2", validation=sets)
    for record in log(tmp_path):
        if record["kind"] == "evaluation":
            assert record["nats_per_token"] == record["nats_per_token/near"] != record["nats_per_token/far"]
            assert record["tokens/near"] == sum(len(each["input_ids"]) for each in sets["near"])
            assert record["standard_error/far"] > 0
    assert list(trainer.summary.validations) == ["near", "far"]
    assert trainer.summary.validation == trainer.summary.validations["near"]
    # Each is the bound of that set alone.
    alone = train(tmp_path / "alone", *OPTIONS, "evaluation.packs=0", "training.steps=2", validation=sets["far"])
    assert alone.summary.validation == trainer.summary.validations["far"]


@pytest.mark.parametrize(
    "validation, sentence",
    [
        ({}, "data.validation: names no set"),
        ({"near": "nowhere.jsonl"}, "data.validation.near=nowhere.jsonl: no such dataset"),
        (
            {"near": documents(2), "far": [{"input_ids": [3, 4], "loss_mask": [0, 0]}]},
            "data.validation.far=list: holds",
        ),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_named(tmp_path, validation, sentence):
    with pytest.raises(UserError) as error:
        train(tmp_path / "run", validation=validation)
    assert sentence in str(error.value)
    assert not (tmp_path / "run").exists()
