"""Model folders with a value of another kind, or weights that are none: one sentence that names the folder."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.tiny import MODEL, train
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models.families.transformers import empty_model
from unmask.models.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    fields = {key: value for key, value in MODEL.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields)).save_pretrained(path)
    return path


KEYS = ["pad_token_id", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rope_theta", "layer_types",
        "rope_parameters", "hidden_act", "architectures", "vocab_size", "model_type", "rms_norm_eps"]  # fmt: skip


def test_values_of_another_kind_are_one_sentence(folder):
    file, refused = folder / "config.json", 0
    own = json.loads(file.read_text())
    try:
        for key in KEYS:
            for value in ("x", [], {}, 1e30, 10**30):
                file.write_text(json.dumps(own | {key: value}))
                with torch.device("meta"):
                    try:
                        empty_model(folder, torch.float32)
                    except UserError as error:
                        assert str(folder) in str(error) and "\n" not in str(error), error
                        refused += 1
        file.write_text("[" * 10_000)
        with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON"):
            load(ModelConfig(name=str(folder)))
        file.write_text(json.dumps(own | {"pad_token_id": "x"}))
        with pytest.raises(UserError, match="pad_token_id"):
            load(ModelConfig(name=str(folder), mask_token_id=63))
    finally:
        file.write_text(json.dumps(own))
    assert refused > 40


def test_weights_that_torch_refuses(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(UserError, match="transformers cannot load it"):
        load(ModelConfig(name=str(tmp_path)))
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(UserError, match="no file of this folder"):
        load(ModelConfig(name=str(tmp_path)))


def test_a_model_type_is_a_name():
    with pytest.raises(UserError, match=r"model\.config\.model_type=\[\]: give a name"):
        load(ModelConfig(config={"model_type": []}))


def test_a_checkpoint_that_is_a_link_is_pruned(tmp_path):
    run = tmp_path / "run"
    train(run, "training.steps=1")
    (run / "step-00000001").rename(tmp_path / "elsewhere")
    (run / "step-00000001").symlink_to(tmp_path / "elsewhere")
    train(run, "training.steps=3", "checkpoint.every=1", "checkpoint.keep=1")
    assert [entry.name for entry in run.glob("*step-*")] == ["step-00000003"]
    assert (tmp_path / "elsewhere" / "state.json").exists()


def test_a_width_of_nothing_is_refused():
    with pytest.raises(UserError, match="model.config: intermediate_size=0 is no size"):
        load(ModelConfig(config={**MODEL, "intermediate_size": 0}))
