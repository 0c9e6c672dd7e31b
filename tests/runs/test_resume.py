"""A record that lacks an option, because it is older, stands for the option's default; a special token is no matter."""

import json
import shutil

import pytest

from tests.training.tiny import config, documents, losses, train
from unmask.errors import UserError
from unmask.runs import folder as layout
from unmask.runs.resume import LEFT_OUT, continued
from unmask.training.setup import prepare

BLOCKS = {"name": "block_diffusion", "block_size": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps by every objective of the tests."""
    folder = tmp_path_factory.mktemp("runs")
    for name, objective in (("mdlm", {"name": "mdlm"}), ("block_diffusion", BLOCKS)):
        train(folder / name, "training.steps=2", objective=objective)
    train(folder / "lora", "training.steps=2", "model.lora.rank=2", objective=BLOCKS)
    return folder


def older(run, path, *keys, **values):
    """A copy of the run at `path` whose record lacks `keys` and has `values` instead; dots lead into the model."""
    shutil.copytree(run, path)
    folder = path / "step-00000002"
    state = json.loads((folder / "state.json").read_text())
    exact = state["exact"]
    for key in keys:
        own = exact["model"]["config"] if key.startswith("model.config.") else exact
        own = exact["model.lora"] if key.startswith("model.lora.") else own
        del own[key.rpartition(".")[2] if own is not exact else key]
    exact["model"]["config"] |= values
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": layout.describe(folder)}))
    return path


def goes_on(path, *overrides, data=None, **objective):
    return continued(prepare(config(path, *overrides, objective=objective), data or documents()).identity)


@pytest.mark.parametrize(
    "name, option, other",
    [("mdlm", "weight_offset", 1e-6), ("block_diffusion", "confidence", 0.5), ("block_diffusion", "draws", 2)],
)
def test_an_option_younger_than_the_run(runs, tmp_path, name, option, other):
    objective = {"name": name} if name == "mdlm" else BLOCKS
    path = older(runs / name, tmp_path / "run", f"objective.{option}")
    with pytest.raises(UserError, match=rf"cannot be continued exactly: objective\.{option}={other}, but it was [01]"):
        goes_on(path, **objective, **{option: other})
    whole = shutil.copytree(runs / name, tmp_path / "whole")
    for each in (path, whole):
        train(each, "training.steps=4", objective=objective)
    assert losses(path) == losses(whole) and len(losses(path)) == 4


def test_other_parts_of_the_record_likewise(runs, tmp_path):
    lacking = ["data.long_documents", "optimizer.state", "model.config.attention_bias", LEFT_OUT]
    path = older(runs / "block_diffusion", tmp_path / "run", *lacking)
    assert goes_on(path, **BLOCKS).name == "step-00000002"
    for override, sentence in (
        ("data.long_documents=drop", "data.long_documents=drop, but it was cut"),
        ("optimizer.state=bf16", "optimizer.state=bf16, but it was full"),
        ("model.config.attention_bias=true", "model.config.attention_bias=True, but it was False"),
        ("model.lora.rank=2", "model.lora.rank=2, but it was 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            goes_on(path, override, **BLOCKS)
    path = older(runs / "lora", tmp_path / "lora", "model.lora.rslora")
    assert goes_on(path, "model.lora.rank=2", **BLOCKS)
    with pytest.raises(UserError, match=r"model\.lora\.rslora=True, but it was False"):
        goes_on(path, "model.lora.rank=2", "model.lora.rslora=true", **BLOCKS)


def test_a_run_before_parts_were_left_out(runs, tmp_path):
    """Documents without a label were packed then, so that the packs were others."""
    mute = [*documents(), {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}]
    train(tmp_path / "now", "training.steps=2", data=mute)
    assert goes_on(tmp_path / "now", data=mute, **BLOCKS)
    path = older(tmp_path / "now", tmp_path / "run", LEFT_OUT)
    with pytest.raises(UserError, match=rf"{LEFT_OUT}=1, but it was 0"):
        goes_on(path, data=mute, **BLOCKS)


def test_what_has_no_default(runs, tmp_path):
    path = older(runs / "block_diffusion", tmp_path / "run", "model.config.mask_token_id", old_setting=3)
    with pytest.raises(UserError, match=r"model\.config\.mask_token_id=63, but it was not set"):
        goes_on(path, **BLOCKS)
    path = older(runs / "block_diffusion", tmp_path / "other", old_setting=3)
    with pytest.raises(UserError, match=r"model\.config\.old_setting is not set, but it was 3"):
        goes_on(path, **BLOCKS)


def test_special_tokens_are_no_other_run(runs, tmp_path):
    """A model from a configuration has had transformers' ids before it had its tokeniser's."""
    path = older(runs / "mdlm", tmp_path / "run", eos_token_id=2, bos_token_id=1, pad_token_id=0)
    assert goes_on(path, name="mdlm")
