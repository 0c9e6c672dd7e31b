"""Folders of adapters that are damaged, or whose base is another by now: one sentence that names the file."""

import json
import shutil

import pytest
import torch

from tests.models.families import FAMILIES
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.export.peft import write
from unmask.models import load
from unmask.objectives import build
from unmask.runs.open import OpenModel, open_model

LORAS = {"lora": {}, "nf4": {"quantize": "nf4"}, "norms": {"train": ["norms", "embeddings"]}}


def base_of(folder, seed=0, dtype=None, **changes):
    model = load(ModelConfig(config=FAMILIES["qwen3"] | changes, mask_token_id=3), seed=seed).model
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.to(dtype).save_pretrained(folder)


def adapters_of(tmp_path, **options):
    base_of(tmp_path / "base")
    settings = ModelConfig(name=str(tmp_path / "base"), mask_token_id=3, lora={"rank": 2} | options)
    model, _, mask = load(settings)
    objective = build("mdlm", {}).model_copy(update={"mask_token_id": mask})
    (tmp_path / "adapters").mkdir()
    write(OpenModel(model, None, mask, objective, settings), tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.parametrize("name", LORAS)
def test_another_base_is_refused(name, tmp_path):
    """Of the same shapes: other weights, or another setting. The same one opens in any dtype, from wherever it is."""
    if name == "nf4":
        pytest.importorskip("torchao")
    folder = adapters_of(tmp_path, **LORAS[name])
    assert all(open_model(folder, dtype=dtype).settings for dtype in (None, "bfloat16", "float64"))
    shutil.rmtree(tmp_path / "base")
    for changes in ({"seed": 1}, {"rms_norm_eps": 1e-3}):
        base_of(tmp_path / "base", **changes)
        with pytest.raises(UserError, match=r"unmask.json \(model.name=.*another base \(.* differs\)"):
            open_model(folder)
    recorded = json.loads((folder / "unmask.json").read_text())
    del recorded["base"]  # as earlier versions wrote it
    (folder / "unmask.json").write_text(json.dumps(recorded))
    assert open_model(folder).settings


def test_damaged_files_are_named(tmp_path):
    folder = adapters_of(tmp_path)
    weights, said = folder / "adapter_model.safetensors", folder / "unmask.json"
    whole, text = weights.read_bytes(), said.read_text()
    for left in (whole[:-10], whole[:5], b""):
        weights.write_bytes(left)
        with pytest.raises(UserError, match="adapter_model.safetensors: cannot be read"):
            open_model(folder)
    weights.unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors: cannot be read"):
        open_model(folder)
    weights.write_bytes(whole)
    record = json.loads(text)
    for left in (text[:-20], "", "[]", "{}", *(json.dumps(record | {key: 1.5}) for key in record)):
        said.write_text(left)
        with pytest.raises(UserError, match="unmask.json: .*export the adapters again"):
            open_model(folder)
    said.unlink()
    with pytest.raises(UserError, match="unmask.json: missing"):
        open_model(folder)
    said.write_text(text)
    assert open_model(folder).settings


@pytest.mark.parametrize(
    "options, said",
    [({"targets": []}, r"model.lora.targets=\[\]: names no module"), ({"rank": 17}, r"rank=17 is more than .*q_proj")],
)
def test_settings_without_sense(options, said):
    lora = {"rank": 2, "targets": ["q_proj"]} | options
    with pytest.raises(UserError, match=said):
        load(ModelConfig(config=FAMILIES["qwen3"], mask_token_id=3, lora=lora))
