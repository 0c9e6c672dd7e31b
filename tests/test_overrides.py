"""Overrides beat the file: what they leave without effect in it goes, and `~key` removes a key."""

import pytest
from typer.main import get_command

from unmask import Config, Trainer, objectives
from unmask.cli.app import app
from unmask.config import apply_overrides, keys
from unmask.config.synonyms import NAMES
from unmask.errors import UserError, counted
from unmask.sampling.options import Options
from unmask.training.arguments import with_data


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
    given = with_data(trainer.config, ["a text"], None, 0.5, None)
    assert (given.training.steps, given.training.epochs) == (None, 0.5)


def test_the_names_of_other_trainers_lead_to_keys_that_exist():
    known = {*keys(), *Options.model_fields}
    assert set(NAMES) <= known
    plain = {key.split(".")[-1] for key in known}
    assert not [name for names in NAMES.values() for name in names.split() if name in plain]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("lr=1e-4", "optimizer.learning_rate"),
        ("training.lr=1e-4", "optimizer.learning_rate"),
        ("training.max_steps=5", "training.steps"),
        ("training.num_epochs=5", "training.epochs"),
        ("bs=5", "training.batch_size"),
        ("per_device_train_batch_size=5", "training.micro_batch"),
        ("gradient-accumulation-steps=5", "training.micro_batch"),
        ("output_dir=a", "checkpoint.path"),
        ("objective.lr=1", "optimizer.learning_rate"),
    ],
)
def test_the_name_that_another_trainer_has_for_a_key_is_understood(tmp_path, override, key):
    (tmp_path / "run.yaml").write_text("objective: {name: ar}")
    with pytest.raises(UserError) as error:
        config = Config.load(tmp_path / "run.yaml", [override])
        objectives.build(config.objective.chosen, config.objective.options())
    assert f"(did you mean {key!r}?)" in str(error.value)


@pytest.mark.parametrize(("option", "key"), [("max_new_tokens=5", "length"), ("cfg_scale=1", "guidance")])
def test_and_for_an_option_of_a_sampler(option, key):
    with pytest.raises(UserError, match=rf"\(did you mean '{key}'\?\)"):
        Options.read([option])


@pytest.mark.parametrize(("verb", "instead"), [("generate", "unmask sample"), ("finetune", "unmask train")])
def test_and_for_a_verb(verb, instead):
    with pytest.raises(UserError, match=f"unknown command '{verb}': use {instead}"):
        get_command(app)([verb, "x"], standalone_mode=False)


@pytest.mark.parametrize("verb", [[], ["train"], ["sample"]])
def test_help_is_asked_for_by_one_letter_too(verb, capsys):
    get_command(app)([*verb, "-h"], standalone_mode=False)
    assert "Usage: " in capsys.readouterr().out


def test_one_of_a_thing_is_one():
    assert [counted(number, "document") for number in (0, 1, 2000)] == ["0 documents", "1 document", "2,000 documents"]
