"""What is refused before the first step, by training and by a dry run alike, and what is not."""

import json
import math
from pathlib import Path
from unittest import mock

import pytest

from tests.training.tiny import config, documents, log, losses, train
from unmask import Config, Trainer
from unmask.errors import UserError
from unmask.objectives import Objective, objectives
from unmask.planning.dry_run import plan
from unmask.training import refusals, setup

PROMPTS = [{"input_ids": list(range(20)), "loss_mask": [0] * 20}] * 3
OBJECTIVES = [{"name": "ar"}, {"name": "mdlm"}, {"name": "block_diffusion"}, {"name": "fast_dllm_v2"}]


def refused(path, *overrides, sentence, **options):
    with pytest.raises(UserError) as error:
        train(path / "run", *overrides, **options)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["schedule.warmup=5"], "schedule.warmup=5 is longer than the run, which has 4 steps"),
        (["training.epochs=2"], "training.epochs=2.0 has no effect beside training.steps=4"),
        (["schedule.name=cosin"], "unknown schedule 'cosin' (did you mean 'cosine'?)"),
        (["evaluation.ema=false"], "evaluation.ema=false has no effect: training.ema=0 keeps no EMA weights"),
        (["model.mask_noise_steps=2", "objective.name=ar"], "model.mask_noise_steps=2 has no effect"),
        (["model.attention=flex"], "FlexAttention has no backward on CPU"),
        (
            ["objective.name=mdlm", "objective.block_size=8"],
            "'block_size' (an option of block_diffusion, ",
        ),
        (["parallel.placement=csbp"], "parallel.placement=csbp has no effect with block_parallel_size=1"),
        (["objective.window=[0.3, 0.8]"], "window=[0.3, 0.8] has no effect here: it needs clip: auto"),
    ],
)
def test_a_setting_without_effect(tmp_path, overrides, sentence):
    objective = {"name": "ar"} if "objective.name=ar" in overrides else None
    refused(tmp_path, *overrides, sentence=sentence, objective=objective)


def test_a_dry_run_shows_the_epochs_that_are_asked_for(tmp_path):
    asked = config(tmp_path, "training.steps=null", "training.epochs=10", "training.batch_size=3")
    counted = config(tmp_path, "training.batch_size=3")
    for settings in (asked, counted):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, documents(9))))
        settings.data.train = str(tmp_path / "data.jsonl")
    facts = plan(asked)
    assert facts["epochs"] == 10 and facts["steps"] == math.ceil(10 * facts["packs"] / 3)
    assert plan(counted)["epochs"] == round(4 * 3 / facts["packs"], 4)


def test_the_config_of_a_run_whose_length_was_changed_trains_on(tmp_path):
    def shorter(trainer, record):
        trainer.set_steps(3)

    Trainer(config=config(tmp_path), callbacks=[shorter]).train(documents(), epochs=2)
    written = Config.load(tmp_path / "config.yaml", ["training.steps=5"])
    assert Trainer(config=written).train(documents()).step == 5


def test_a_warmup_as_long_as_the_run_is_none_too_long(tmp_path):
    train(tmp_path, "schedule.warmup=4")
    assert [record["learning_rate"] for record in log(tmp_path)] == pytest.approx(
        [0.003 * share for share in (0.25, 0.5, 0.75, 1.0)]
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective["name"])
def test_data_without_a_target(tmp_path, objective):
    refused(tmp_path, sentence="data.train=list: holds no token to learn from", objective=objective, data=PROMPTS)
    sentence = "data.validation=list: holds no token to learn from"
    refused(tmp_path, sentence=sentence, objective=objective, validation=PROMPTS)


def test_documents_longer_than_the_positions_of_the_model(tmp_path):
    long, short = [{"input_ids": list(range(33))}], [{"input_ids": list(range(32))}] * 4
    model = {"max_position_embeddings": 32}
    has = "has 33 tokens, and the model 32 positions (max_position_embeddings): set data.pack_tokens to 32 or less"
    for key, data in (("train", {"data": short + long}), ("validation", {"data": short, "validation": long})):
        found = setup.prepare(config(tmp_path / "run", "data.pack_tokens=32", model=model), *data.values())
        assert found.source.mixture.sources[0].packs.longest == 32
        with pytest.raises(UserError) as error:
            setup.prepare(config(tmp_path / "run", model=model), *data.values())
        assert str(error.value).startswith(f"data.{key}=list: a document ") and str(error.value).endswith(has)
    # Positions count from 0 in every document: packs of 128 tokens go with 32 positions.
    assert setup.prepare(config(tmp_path / "run", model=model), short).source.mixture.sources[0].packs.fill == 1


def test_tokens_that_no_row_predicts_are_no_targets(tmp_path):
    single = [{"input_ids": [3]}] * 4
    sentence = "holds no token to learn from"
    refused(tmp_path, sentence=sentence, objective={"name": "ar"}, data=single)
    refused(tmp_path, sentence=sentence, objective={"name": "fast_dllm_v2"}, data=single)
    refused(tmp_path, sentence=sentence, objective={"name": "block_diffusion", "keep_first": True}, data=single)
    train(tmp_path, objective={"name": "mdlm"}, data=single)


def test_a_step_without_labels_is_fine(tmp_path):
    """Of each document only the first token is to be learnt, which no row predicts."""
    data = [{"input_ids": list(range(60)) * 2, "loss_mask": [1] + [0] * 119}] * 3 + documents(1)
    train(tmp_path, "training.batch_size=1", data=data, objective={"name": "ar"})
    logged = [loss for _, loss in losses(tmp_path)]
    assert logged.count(0.0) == 3 and sum(loss > 1 for loss in logged) == 1


def test_an_objective_without_a_bound_takes_no_validation_data(tmp_path):
    class Boundless(objectives["mdlm"]):
        evaluation = Objective.evaluation

    objectives.add("boundless", Boundless)
    sentence = "data.validation: Boundless has no likelihood bound: leave it out"
    refused(tmp_path, sentence=sentence, objective={"name": "boundless"}, validation=documents(3))
    trainer = train(tmp_path / "run", objective={"name": "boundless"})
    assert math.isfinite(trainer.summary.loss)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["checkpoint.step=3"], "no checkpoint of step 3; it has 4"),
        (["checkpoint.resume=false"], "holds a run already (step-00000004)"),
        (["training.seed=1"], "cannot be continued exactly: training.seed=1, but it was 0"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(tmp_path, overrides, sentence):
    train(tmp_path / "run")
    settings = config(tmp_path / "run", *overrides)
    with pytest.raises(UserError) as error:
        _plan(settings)
    assert sentence in str(error.value)


def _plan(settings):
    """`plan` on documents in memory, which a config cannot name."""
    prepare = setup.prepare
    with mock.patch.object(setup, "prepare", lambda given: prepare(given, documents())):
        return plan(settings)


def test_a_dry_run_names_the_checkpoint_it_would_go_on_from(tmp_path):
    assert _plan(config(tmp_path / "run"))["goes_on_from"] is None
    train(tmp_path / "run")
    assert _plan(config(tmp_path / "run"))["goes_on_from"] == "step-00000004"


@pytest.mark.parametrize("path", ["/proc/unmask", "/proc/self/unmask/run"])
def test_a_folder_that_cannot_be_made(path):
    if not Path("/proc/self").is_dir():
        pytest.skip("this system has no /proc, where even root can make no folder")
    with pytest.raises(UserError, match=f"checkpoint.path={path}: /proc.* is not writable"):
        _plan(config(path))


def test_a_mask_token_in_what_is_learnt_is_found_before_the_first_step(tmp_path, monkeypatch):
    data = [*documents(20), {"input_ids": [5, 63, 7], "loss_mask": [1, 1, 1]}]
    refused(tmp_path, data=data, sentence="document 20 holds the mask token (id 63), which only noise may place")
    train(tmp_path / "ar", data=data, objective={"name": "ar"})  # which places none
    data[-1]["loss_mask"] = [1, 0, 1]
    train(tmp_path / "prompt", data=data)
    monkeypatch.setattr(refusals, "SCANNED", 1)  # as of a data set that is larger
    data = [{"input_ids": [5, 63, 7]}] * 20
    with pytest.raises(UserError, match="the training data holds the mask token"):
        train(tmp_path / "later", data=[*documents(1), *data], objective={"name": "block_diffusion", "block_size": 8})
