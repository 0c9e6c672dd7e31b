"""Overrides beat the file: what they leave without effect in it goes, and `~key` removes a key."""

import pytest

from unmask import Config, Trainer
from unmask.config import apply_overrides
from unmask.errors import UserError


@pytest.mark.parametrize(
    ("file", "overrides", "left"),
    [
        ({"training": {"epochs": 3}}, ["training.steps=7"], {"training": {"steps": 7}}),
        ({"training": {"steps": 7}}, ["training.epochs=0.5"], {"training": {"epochs": 0.5}}),
        ({"training": {"epochs": 3}}, ["training.steps=null"], {"training": {"epochs": 3, "steps": None}}),
        ({}, ["training.steps=7", "training.epochs=2"], {"training": {"steps": 7, "epochs": 2}}),
        ({"training": {"epochs": 3, "ema": 0.9}}, ["~training.epochs"], {"training": {"ema": 0.9}}),
        ({"model": {"config": {"model_type": "qwen3"}}}, ["model.name=a"], {"model": {"name": "a"}}),
        (
            {"model": {"name": "a", "dtype": "float64"}},
            ["model.config={model_type: qwen3}"],
            {"model": {"config": {"model_type": "qwen3"}, "dtype": "float64"}},
        ),
        ({"model": {"config": {}}}, ["model.name=null"], {"model": {"config": {}, "name": None}}),
        (
            {"objective": {"name": "block_diffusion", "block_size": 8}},
            ["objective.name=mdlm"],
            {"objective": {"name": "mdlm"}},
        ),
        ({"objective": {"block_size": 8}}, ["objective.name=mdlm"], {"objective": {"name": "mdlm"}}),
        (
            {"objective": {"name": "block_diffusion", "block_size": 8}},
            ["objective.name=fast_dllm_v2"],
            {"objective": {"name": "fast_dllm_v2", "block_size": 8}},
        ),
        (
            {"objective": {"name": "mdlm"}},
            ["objective.name=block_diffusion", "objective.block_size=4"],
            {"objective": {"name": "block_diffusion", "block_size": 4}},
        ),
        (
            {"optimizer": {"name": "muon", "momentum": 0.9, "learning_rate": 0.1}},
            ["optimizer.name=adamw"],
            {"optimizer": {"name": "adamw", "learning_rate": 0.1}},
        ),
        (
            {"schedule": {"name": "wsd", "decay": 0.1, "floor": 0.2, "warmup": 3}},
            ["schedule.name=linear"],
            {"schedule": {"name": "linear", "floor": 0.2, "warmup": 3}},
        ),
        ({"schedule": {"floor": 0.2}}, ["schedule.name=constant"], {"schedule": {"name": "constant"}}),
        ({"model": {"lora": {"rank": 8, "alpha": 16}}}, ["model.lora.rank=0"], {"model": {"lora": {"rank": 0}}}),
    ],
)
def test_an_override_beats_the_file(file, overrides, left):
    apply_overrides(file, overrides)
    assert file == left
    Config.parse(file)


def test_what_is_misspelt_in_the_file_is_not_dropped(tmp_path):
    (tmp_path / "run.yaml").write_text("objective: {name: block_diffusion, block_sise: 8}")
    config = Config.load(tmp_path / "run.yaml", ["objective.name=mdlm"])
    assert config.objective.options() == {"block_sise": 8}


@pytest.mark.parametrize("text", ["~training.epochs", "~model", "~a.b.c"])
def test_a_key_that_is_not_there_cannot_be_removed(text):
    with pytest.raises(UserError, match="removes a key that is not in the file"):
        apply_overrides({"training": {"steps": 1}}, [text])


def test_arguments_of_a_trainer_beat_its_config_in_the_same_way():
    config = Config.parse({"model": {"config": {"model_type": "qwen3"}}, "training": {"steps": 5}})
    trainer = Trainer("folder", config=config)
    assert (trainer.config.model.name, trainer.config.model.config) == ("folder", None)
    trainer._configure(["a text"], None, 0.5, None)
    assert (trainer.config.training.steps, trainer.config.training.epochs) == (None, 0.5)
