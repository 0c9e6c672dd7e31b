"""Weights that are read late are those that are read at once, in memory of their own."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.families import FAMILIES
from tests.models.published import PUBLISHED
from tests.models.test_families import write
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models import load
from unmask.models.families.deferred import Deferred


def both(folder, **settings):
    """(loaded whole, loaded late and not yet read, what is to be read)."""
    config, deferred = ModelConfig(name=str(folder), mask_token_id=39, **settings), Deferred()
    return load(config).model, load(config, deferred=deferred).model, deferred


def is_whole(late, whole):
    ours, wanted = dict(late.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(ours[name], parameter) and ours[name].dtype == parameter.dtype, name
    assert len({each.data_ptr() for each in ours.values()}) == len(ours)


@pytest.mark.parametrize("layout", PUBLISHED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_published_layouts(layout, dtype, tmp_path):
    whole, late, deferred = both(write(tmp_path, PUBLISHED[layout](), 3), dtype=dtype)
    assert deferred.names and all(".layers.0." not in name for name in deferred.names)
    lent = {each.data_ptr() for name, each in late.named_parameters() if ".layers." in name}
    assert len(lent) < len(deferred.names)
    deferred.read(late)
    is_whole(late, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_transformers_own(family, tmp_path):
    load(ModelConfig(config=FAMILIES[family], mask_token_id=39), seed=1).model.save_pretrained(tmp_path)
    whole, late, deferred = both(tmp_path)
    assert deferred.names
    deferred.read(late)
    is_whole(late, whole)


def test_what_transformers_would_rename_or_leave_out_is_loaded_whole(tmp_path):
    load(ModelConfig(config=FAMILIES["llama"], mask_token_id=39)).model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.extra": torch.zeros(2)}, file, metadata={"format": "pt"})
    whole, late, deferred = both(tmp_path)
    assert not deferred.names
    is_whole(late, whole)


def test_a_file_that_has_gone_is_one_sentence(tmp_path):
    _, late, deferred = both(write(tmp_path, PUBLISHED["SDAR"](), 3))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read any more"):
        deferred.read(late)


def test_a_shape_that_does_not_fit_is_found_before_anything_is_read(tmp_path):
    made = PUBLISHED["SDAR"]()
    (folder := write(tmp_path, made, 3) / "config.json").write_text(
        json.dumps({**made.config, "intermediate_size": 20})
    )
    with pytest.raises(UserError, match="has the shape"):
        both(folder.parent)
