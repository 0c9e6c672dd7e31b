"""Weights that are filled in after a model was built are those that it is loaded with at once."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.families import FAMILIES
from tests.models.published import PUBLISHED
from tests.models.test_families import write
from tests.training.tiny import config, train
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models import load
from unmask.models.families.materialise import fill, is_unread
from unmask.models.families.stored import Stored
from unmask.training.setup import prepare


def both(folder, **settings):
    """(loaded at once, loaded and not yet filled)."""
    config = ModelConfig(name=str(folder), mask_token_id=39, **settings)
    return load(config).model, load(config, unread=True).model


def is_whole(late, whole):
    ours, wanted = dict(late.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(ours[name], parameter) and ours[name].dtype == parameter.dtype, name
    assert len({each.data_ptr() for each in ours.values()}) == len(ours)


@pytest.mark.parametrize("layout", PUBLISHED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_published_layouts(layout, dtype, tmp_path):
    whole, late = both(write(tmp_path, PUBLISHED[layout](), 3), dtype=dtype)
    assert all(each.is_meta for name, each in late.named_parameters() if ".layers." in name)
    fill(late)
    is_whole(late, whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_of_transformers_own(family, dtype, tmp_path):
    load(ModelConfig(config=FAMILIES[family], mask_token_id=39), seed=1).model.save_pretrained(tmp_path)
    whole, late = both(tmp_path, dtype=dtype)
    assert is_unread(late)
    fill(late)
    is_whole(late, whole)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    is_whole(late, stock)
    is_whole(whole, stock)


def test_of_a_step_of_a_run(tmp_path):
    trained = train(tmp_path / "run", "training.steps=1")
    step = ModelConfig(name=str(tmp_path / "run"), dtype="bfloat16")
    whole, late = load(step).model, load(step, unread=True).model
    assert is_unread(late)
    fill(late)
    is_whole(late, whole)
    is_whole(late, trained.run.model.to(torch.bfloat16))


def test_a_mask_token_may_grow_the_ends_before_the_rest_is_read(tmp_path):
    fields = {key: value for key, value in FAMILIES["llama"].items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(tmp_path)
    whole, late = (load(ModelConfig(name=str(tmp_path)), unread=unread).model for unread in (False, True))
    assert late.config.mask_token_id == fields["vocab_size"] and is_unread(late)
    fill(late)
    is_whole(late, whole)


def test_what_transformers_would_rename_is_loaded_whole(tmp_path):
    load(ModelConfig(config=FAMILIES["llama"], mask_token_id=39)).model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    whole, late = both(tmp_path)
    assert not is_unread(late) and torch.equal(whole.model.norm.weight, tensors["model.norm.weight"])
    is_whole(late, whole)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("stale_index", [True, False])
def test_the_files_that_are_read_are_those_that_transformers_reads(own, stale_index, tmp_path):
    """model.safetensors, whatever lies beside it and whatever an index says."""
    if own:
        load(ModelConfig(config=FAMILIES["llama"], mask_token_id=39), seed=1).model.save_pretrained(tmp_path)
    else:
        write(tmp_path, PUBLISHED["SDAR"]())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "model_old.safetensors")
    if stale_index:
        table = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model_old.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    whole, late = both(tmp_path)
    assert torch.equal(whole.model.norm.weight, tensors["model.norm.weight"]) and is_unread(late)
    fill(late)
    is_whole(late, whole)


def test_without_an_index_every_file_of_a_family_counts_and_no_tensor_twice(tmp_path):
    write(tmp_path, made := PUBLISHED["SDAR"](), 3)
    (tmp_path / "model.safetensors.index.json").unlink()
    whole, late = both(tmp_path)
    assert torch.equal(whole.model.norm.weight, made.tensors["model.norm.weight"])
    fill(late)
    is_whole(late, whole)
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "old.safetensors")
    with pytest.raises(UserError, match="old.safetensors: holds model.norm.weight, as model-.* does; remove one"):
        both(tmp_path)


def test_a_head_that_config_json_ties_and_the_folder_does_not_is_refused(tmp_path):
    """transformers would train the two, and whoever opens the run would tie them."""
    load(ModelConfig(config=FAMILIES["llama"], mask_token_id=39)).model.save_pretrained(tmp_path)
    file, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    for unread in (False, True):
        with pytest.raises(UserError, match="say in config.json that they are not tied"):
            load(ModelConfig(name=str(tmp_path), mask_token_id=39), unread=unread)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for model in both(tmp_path):
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("change", ["gone", "another", "shape"])
def test_a_file_that_changes_before_it_is_read(change, tmp_path):
    _, late = both(write(tmp_path, PUBLISHED["SDAR"](), 3))
    file = tmp_path / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    file.unlink()
    if change != "gone":
        save_file({k: v[:1].clone() if change == "shape" else v + 1 for k, v in tensors.items()}, file)
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors: (has gone|was changed)") as caught:
        fill(late)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    """torch's own message would hold a traceback."""
    _, late = both(write(tmp_path, PUBLISHED["SDAR"](), 3))
    for file in tmp_path.glob("*-0000[23]-*.safetensors"):
        file.unlink()
    monkeypatch.setattr(Stored, "check_unchanged", lambda self: None)
    with pytest.raises(UserError, match="cannot be read any more: No such file") as caught:
        fill(late)
    assert "\n" not in str(caught.value)


def test_a_shape_that_does_not_fit_is_found_before_anything_is_read(tmp_path):
    made = PUBLISHED["SDAR"]()
    (folder := write(tmp_path, made, 3) / "config.json").write_text(
        json.dumps({**made.config, "intermediate_size": 20})
    )
    with pytest.raises(UserError, match="has the shape"):
        both(folder.parent)


def test_a_run_says_when_its_processes_load_the_whole(tmp_path):
    load(ModelConfig(config=FAMILIES["llama"], mask_token_id=39)).model.save_pretrained(tmp_path / "whole")
    file, said = tmp_path / "whole" / "model.safetensors", []
    for change in ({}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}):
        save_file({**load_file(file), **change}, file, metadata={"format": "pt"})
        options = ["model.config=null", f"model.name={file.parent}", "model.mask_token_id=39", "parallel.shard_size=2"]
        run = prepare(config(tmp_path / "run", *options), [{"input_ids": list(range(20))}] * 4)
        said.append([note for note in run.notes() if "loaded whole by every process" in note])
    assert [len(notes) for notes in said] == [0, 1]
