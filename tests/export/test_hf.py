"""An exported folder against the model it came from, through transformers alone."""

from __future__ import annotations

import copy
import json
import resource

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.sampling.reference import MASK, block_mask, tiny
from unmask.data import train_tokenizer
from unmask.errors import UserError
from unmask.export import export, formats
from unmask.export.hf import write
from unmask.objectives import build
from unmask.runs.open import OpenModel, open_model
from unmask.sampling import sample


def opened(name: str = "block_diffusion", tokenizer=None, **options) -> OpenModel:
    model, _ = tiny()
    model = model.float()
    model.config.dtype = torch.float32
    objective = build(name, options).model_copy(update={"mask_token_id": MASK})
    return OpenModel(model, tokenizer, MASK, objective)


def test_transformers_gives_the_same_logits(tmp_path):
    ours = opened(block_size=4)
    write(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    mask = torch.zeros(12, 12).masked_fill(~block_mask(8, 4, 8, 4), torch.finfo(torch.float32).min)[None, None]
    token = torch.randint(0, 38, (1, 12), generator=torch.Generator().manual_seed(0))
    position = torch.tensor([[*range(8), *range(4, 8)]])
    reference = copy.deepcopy(ours.model)
    reference.set_attn_implementation("eager")
    inputs = {"input_ids": token, "position_ids": position, "attention_mask": {"full_attention": mask}}
    with torch.no_grad():
        torch.testing.assert_close(theirs(**inputs).logits, reference(**inputs).logits, rtol=0, atol=1e-6)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mask_token_id"] == MASK
    assert config["unmask"]["name"] == "block_diffusion"
    assert config["unmask"]["decoding"] == {"kind": "block", "block_size": 4, "shift": False, "causal": False}
    assert "unmask sample" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("name", ["ar", "mdlm", "block_diffusion", "fast_dllm_v2"])
def test_unmask_opens_it_again(tmp_path, name):
    ours = opened(name)
    write(ours, tmp_path)
    again = open_model(tmp_path)
    assert again.objective == ours.objective
    assert again.mask_token_id == MASK
    options = {"length": 9} if name == "ar" else {"length": 9, "block_size": 4}
    expected = sample(ours.model, None, [1, 2, 3], decoding=ours.objective.decoding, **options)
    # Without decoding=: the folder says how it was trained.
    assert sample(again.model, None, [1, 2, 3], **options).token == expected.token


def test_the_tokeniser_travels(tmp_path):
    tokenizer = train_tokenizer(["def f(x): return x"], 300, tmp_path / "tokenizer")
    write(opened(tokenizer=tokenizer), tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.encode("def f") == tokenizer.encode("def f")
    assert again.mask_token == tokenizer.mask_token


def test_what_is_refused(tmp_path):
    write(opened(), tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("keep me")
    with pytest.raises(UserError, match="is not empty.*--force"):
        export(tmp_path / "model", tmp_path / "full")
    with pytest.raises(UserError, match="is a file"):
        export(tmp_path / "model", tmp_path / "full" / "thesis.txt")
    with pytest.raises(UserError, match="unknown format 'gguf'; known: family, hf"):
        export(tmp_path / "model", tmp_path / "new", format="gguf")
    with pytest.raises(UserError, match="no such checkpoint folder"):
        export(tmp_path / "absent", tmp_path / "new")
    assert export(tmp_path / "model", tmp_path / "full", force=True) == tmp_path / "full"
    assert (tmp_path / "full" / "thesis.txt").read_text() == "keep me"
    assert open_model(tmp_path / "full").mask_token_id == MASK
    assert formats.names() == ["family", "hf", "peft"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interruption_leaves_what_was_there(tmp_path, error):
    write(opened(), tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("old")

    def interrupted(model, folder):
        write(model, folder)
        raise error

    formats.add("interrupted", interrupted)
    raised = UserError if error is OSError else error
    for name in ("full", "new", "new/deeper"):
        with pytest.raises(raised):
            export(tmp_path / "model", tmp_path / name, format="interrupted", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model"]
    assert [path.read_text() for path in (tmp_path / "full").iterdir()] == ["old"]
    formats._added.clear()


@pytest.mark.parametrize("room", [2_000, 200_000])
def test_a_full_disk(tmp_path, room):
    """The weights do not fit, or the weights do and the tokeniser does not: libraries in Rust write both."""
    tokenizer = train_tokenizer(["some text of words and more words"] * 50, 300, tmp_path / "tokenizer")
    tokenizer.add_tokens([f"word-{number:04}" * 8 for number in range(3000)])
    checkpoint = tmp_path / "source"
    export_to(checkpoint, tokenizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(UserError, match="out: cannot be written: File too large; make room") as caught:
            export(checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == {"tokenizer", "source"}


def export_to(folder, tokenizer):
    folder.mkdir()
    write(opened(tokenizer=tokenizer), folder)


def test_weights_of_another_number_of_shards_go(tmp_path):
    write(opened(), tmp_path / "full")
    (tmp_path / "full" / "model.safetensors").rename(tmp_path / "full" / "model-00001-of-00001.safetensors")
    (tmp_path / "full" / "model.safetensors.index.json").write_text("{}")
    write(opened(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "full", force=True)
    assert [path.name for path in (tmp_path / "full").glob("*.safetensors*")] == ["model.safetensors"]


def test_dtype(tmp_path):
    write(opened(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_model_that_masks_nothing_goes_back_bit_for_bit(with_tokenizer, tmp_path):
    """A folder of somebody's, autoregressive, without a mask token: nothing was trained, so no row is added."""
    from safetensors.torch import load_file

    model, _ = tiny()
    model.config.mask_token_id = None
    model.float().save_pretrained(tmp_path / "theirs")
    if with_tokenizer:
        tokenizer = train_tokenizer(["some text"], 300, tmp_path / "tokenizer")
        tokenizer.mask_token = None
        model.resize_token_embeddings(len(tokenizer) - 1, mean_resizing=False)
        model.save_pretrained(tmp_path / "theirs")
        tokenizer.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "theirs", tmp_path / "ours", objective="ar")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config.get("mask_token_id") is None and config["vocab_size"] == len(before["model.embed_tokens.weight"])
    assert open_model(tmp_path / "ours").mask_token_id is None
