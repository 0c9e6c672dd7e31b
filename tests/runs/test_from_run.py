"""A run's folder stands for a model: that of its newest checkpoint."""

import pytest
import torch

from tests.training.tiny import config, documents, log, train, weights
from unmask import Config, Trainer, UserError
from unmask.models.families.materialise import fill
from unmask.runs.open import open_model
from unmask.training import setup

HERE = ["model.config=null", "model.mask_token_id=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    train(path, "training.steps=3", "checkpoint.every=2", objective={"name": "mdlm"})
    return path


@pytest.mark.parametrize("name, step", [("", 3), ("step-00000002", 2)])
def test_its_newest_checkpoint_is_trained_further(run, name, step, tmp_path):
    said = []
    settings = config(tmp_path, *HERE, f"model.name={run / name}", "training.steps=1", objective={"name": None})
    prepared = setup.prepare(settings, documents())
    fill(prepared.model, "cpu")
    source = open_model(run / f"step-{step:08d}")
    for name, weight in source.model.named_parameters():
        torch.testing.assert_close(dict(prepared.model.named_parameters())[name], weight, rtol=0, atol=0)
    assert prepared.objective.mask_token_id == 63 and prepared.config.objective.chosen == "mdlm"
    said = [note for note in prepared.said if note.startswith("model.name=")]
    assert bool(said) is (step == 3) and all(f"a run, whose model at {run}/step-00000003 is taken" in x for x in said)


def test_it_is_written_down_which_step_it_was(run, tmp_path):
    trainer = Trainer(str(run), config=Config.parse({"data": {"pack_tokens": 128}, "log": {"console": "none"}}),
                      checkpoint_path=tmp_path / "new")  # fmt: skip
    trainer.config.training.steps = 1
    trainer.train(documents())
    assert Config.load(tmp_path / "new" / "config.yaml").model.name == str(run / "step-00000003")
    assert len(log(tmp_path / "new")) == 1 and weights(trainer)


def test_adapters_are_exported_first_and_an_empty_folder_is_no_run(tmp_path):
    train(tmp_path / "adapted", "training.steps=1", "model.lora.rank=2")
    for path, sentence in (("adapted", "holds adapters beside its model: export it"), ("empty", "it is no run with a")):
        (tmp_path / path).mkdir(exist_ok=True)
        with pytest.raises(UserError, match=sentence):
            setup.prepare(config(tmp_path / "x", *HERE, f"model.name={tmp_path / path}"), documents())
