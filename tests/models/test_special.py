"""Beginning, end and padding: of a model that starts from a configuration those of its tokeniser, and nobody else's."""

import json

import pytest

from tests.models import published
from tests.models.test_families import write
from unmask import Config, Trainer
from unmask.config import ModelConfig
from unmask.data import train_tokenizer
from unmask.errors import UserError
from unmask.export import export
from unmask.models import load
from unmask.models.special import KINDS
from unmask.runs.open import open_model
from unmask.sampling.chat import Conversation
from unmask.sampling.options import Options
from unmask.sampling.session import Session

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Its end is 0 and its padding 2; what is Llama's end is a padding here, and Llama's beginning the mask."""
    return train_tokenizer(["use # here"], 300, tmp_path_factory.mktemp("tokenizer"))


def ids(config):
    return [getattr(config, kind, None) for kind in KINDS]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "phi3", "olmo2", "qwen3"])
def test_a_configuration_takes_them_from_the_tokeniser(kind, tokenizer):
    model = load(ModelConfig(config={"model_type": kind, **SHAPE}), tokenizer).model
    assert ids(model.config) == ids(model.generation_config) == [None, 0, 2]
    without = load(ModelConfig(config={"model_type": kind, **SHAPE})).model
    assert ids(without.config) == ids(without.generation_config) == [None, None, None]


def test_what_is_given_wins_and_what_has_no_row_is_left_out(tokenizer):
    given = {"model_type": "llama", **SHAPE, "eos_token_id": 7, "bos_token_id": None}
    assert ids(load(ModelConfig(config=given), tokenizer).model.config) == [None, 7, 2]
    small = {"model_type": "llama", **SHAPE, "vocab_size": 2}
    assert ids(load(ModelConfig(config=small), tokenizer).model.config) == [None, 0, None]


def test_a_run_its_export_and_a_chat_end_where_the_tokeniser_does(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tree = {
        "model": {"config": {"model_type": "llama", **SHAPE}},
        "data": {"tokenizer": str(tmp_path / "tokenizer"), "pack_tokens": 32},
        "training": {"steps": 1},
        "checkpoint": {"path": str(tmp_path / "run")},
        "log": {"console": "none"},
    }
    Trainer(config=Config.parse(tree)).train(["use # here"])
    out = export(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((out / name).read_text())
        assert written["eos_token_id"] == 0 and written.get("bos_token_id") is None, name
    for folder in (tmp_path / "run", out):
        opened = open_model(folder)
        session = Session(opened.model, opened.tokenizer, Options(), opened.objective.decoding)
        assert session.ends == {0}
        session.end_with(Conversation(opened.tokenizer).end_tokens())
        assert session.ends == {0}, "2 is an ordinary token here"


def test_an_export_lacks_no_end_that_its_tokeniser_has(tokenizer, tmp_path):
    """A folder whose config names none."""
    model = load(ModelConfig(config={"model_type": "qwen3", **SHAPE})).model
    model.generation_config.temperature = 0.6  # as published files have it, without do_sample
    model.config.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(model.generation_config.to_json_string())
    from safetensors.torch import save_model

    save_model(model, str(tmp_path / "base" / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(tmp_path / "base")
    out = export(tmp_path / "base", tmp_path / "out", objective="ar")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0


def test_the_folders_own_end_tokens_end_a_text_and_travel(tmp_path):
    made = published.llada(mask_token_id=39)
    folder = write(tmp_path / "base", made)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 999], "temperature": 0.7}))
    opened = open_model(folder)
    assert Session(opened.model, None, Options(), opened.objective.decoding).ends == {5, 7}
    tree = {
        "model": {"name": str(folder)},
        "data": {"pack_tokens": 32},
        "training": {"steps": 1},
        "checkpoint": {"path": str(tmp_path / "run")},
        "log": {"console": "none"},
    }
    Trainer(config=Config.parse(tree)).train([{"input_ids": [8, 9, 10]}])
    trained = open_model(tmp_path / "run")
    assert Session(trained.model, None, Options(), trained.objective.decoding).ends == {5, 7}
    out = export(tmp_path / "run", tmp_path / "out", format="hf")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [5, 7, 999]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ["a"]}))
    with pytest.raises(UserError, match="eos_token_id=.* of generation_config.json: give the id"):
        opened = open_model(folder)
        Session(opened.model, None, Options(), opened.objective.decoding)
