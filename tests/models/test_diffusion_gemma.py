"""DiffusionGemma over rows is transformers' encoder and decoder, run canvas by canvas; its folder stays its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.diffusion_gemma import by_canvas, documents, logits_of, objective, stock, tiny
from tests.models.diffusion_gemma_config import CONFIG, TEXT
from tests.parallel.trainer_cases import documents as prompts
from tests.training.tiny import config
from unmask.config import ModelConfig
from unmask.engine import activations
from unmask.errors import UserError
from unmask.models import RowModel, load
from unmask.models.mask_token import ensure_mask_token
from unmask.objectives import build
from unmask.planning.footprint import footprint
from unmask.training import setup

FROZEN = ("router", "vision")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "options", [{"self_conditioning": 1.0}, {"draws": 2}, {"self_conditioning": 0.0, "fill": "none"}]
)
def test_rows_are_encoder_and_decoder_canvas_by_canvas(options, dtype, tmp_path):
    model = tiny(dtype)
    model.save_pretrained(tmp_path)
    twin, docs = stock(tmp_path, dtype), documents()
    goal = objective(model, **options)
    rows = goal.rows(docs, 1)
    rows.check()
    expected, logits = by_canvas(twin, docs, rows)
    expected.backward()

    row_model = RowModel(model).eval()
    batch = row_model.collate(rows)
    tolerance = {"float64": 1e-5, "float32": 1e-4}[dtype]
    torch.testing.assert_close(
        logits_of(model, row_model.decoded(batch, twice=goal.second_pass)[0]), logits, rtol=tolerance, atol=tolerance
    )
    pruned = row_model.collate(rows.pruned())
    terms = row_model(pruned, goal)
    torch.testing.assert_close(terms.sum, expected, rtol=tolerance, atol=0)
    terms.sum.backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if any(part in name for part in FROZEN):
            assert parameter.grad is None and not parameter.requires_grad
            continue
        tied = name.replace("model.decoder.", "model.encoder.language_model.")
        wanted = (theirs[name] if name in theirs else theirs[tied]).grad
        if parameter.grad is None:  # without a first pass the signal is zero, and so is what learns from it
            assert "self_conditioning" in name and not wanted.any()
            continue
        scale = float(wanted.abs().max()) or 1.0
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_layers_keep_each_row_its_scalar(mode):
    plain, again = tiny(), tiny()
    activations.apply(again, mode)
    for model in (plain, again):
        goal = objective(model, self_conditioning=1.0)
        row_model = RowModel(model).train()
        batch = row_model.collate(goal.rows(documents(), 1))
        row_model(batch, goal).sum.backward()
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


#: (tokens, those of the prompt) of a pack's documents: some are told and some not, some are prompts only, one is none.
PACKS = (((23, 9), (14, 3), (9, 5)), ((12, 12), (4, 0)), ((9, 9),))


@pytest.mark.parametrize("pack", PACKS, ids=str)
@pytest.mark.parametrize("told", [1.0, 0.5, 0.01])
def test_clean_rows_that_run_once_change_nothing(pack, told):
    models, losses = (tiny(), tiny()), []
    for model, apart in zip(models, (True, False), strict=True):
        goal, row_model = objective(model, self_conditioning=told, encoder_weight=0.7), RowModel(model)
        row_model.apart = apart
        batch = row_model.collate(goal.rows(documents(pack), 3).pruned())
        losses.append(row_model(batch, goal).sum)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            scale = float(theirs.grad.abs().max()) or 1.0
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11 * scale)


def test_clean_rows_run_once_and_the_first_pass_takes_only_who_is_told():
    model = tiny()
    row_model, sizes = RowModel(model), []
    goal = objective(model)
    rows = goal.rows(documents(), 3)
    told, noisy = int(rows.signal.sum()), len(rows) - rows.clean
    assert 0 < told < noisy
    model.model.layers[-1].register_forward_hook(lambda layer, given, out: sizes.append(out.shape[1]))
    batch = row_model.collate(rows)
    row_model(batch, goal)
    assert sizes == [rows.clean, told, noisy]


def test_a_dry_run_foretells_the_memory_of_both_passes(tmp_path):
    settings = config(tmp_path, objective={"name": "diffusion_gemma", "self_conditioning": 1.0}, model=CONFIG)
    run = setup.prepare(settings, prompts("prompt"))
    rows = [run.objective.rows(documents(), 1).pruned()]
    with_signal = footprint(run, rows).activations
    run.objective = run.objective.model_copy(update={"self_conditioning": 0.0})
    assert with_signal > footprint(run, rows).activations > 0


def test_a_first_pass_under_autocast_takes_no_gradient_from_the_second():
    model = tiny("float32")
    goal, row_model = objective(model, self_conditioning=1.0), RowModel(model)
    batch = row_model.collate(goal.rows(documents(), 1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = row_model(batch, goal).sum
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert [name for name, parameter in trained.items() if parameter.grad is None] == []


def test_a_folder_keeps_its_layout_bit_by_bit(tmp_path):
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    fields = {key: value for key, value in CONFIG.items() if key != "model_type"}
    theirs = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**copy.deepcopy(fields)))
    for number, layer in enumerate(theirs.model.encoder.language_model.layers):
        layer.layer_scalar.fill_(0.5 + number)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(ModelConfig(name=str(tmp_path / "theirs")))
    assert ours.mask_token_id is None
    ours.model.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


REFUSED = {
    "whose encoder shares no weights": {"tie_word_embeddings": False},
    "whose encoder looks ahead": {"text_config": {**TEXT, "use_bidirectional_attention": "all"}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_other_encoders_are_refused(said):
    with pytest.raises(UserError, match=said):
        load(ModelConfig(config={**CONFIG, **REFUSED[said]}))


def test_images_mask_tokens_and_other_objectives_are_refused():
    model = tiny("float32")
    docs = documents()
    docs[1].token[4] = 63
    with pytest.raises(UserError, match="token id 63 .image_token_id."):
        RowModel(model).collate(objective(model).rows(docs, 1))
    with pytest.raises(UserError, match="DiffusionGemma has no mask token"):
        load(ModelConfig(config=CONFIG, mask_token_id=5))
    with pytest.raises(UserError, match="has no mask token; use objective.name=diffusion_gemma"):
        build("block_diffusion").bind(model, None, None)
    qwen = load(
        ModelConfig(config={"model_type": "qwen3", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1})
    )
    with pytest.raises(UserError, match="trains DiffusionGemma, and the model is Qwen3ForCausalLM"):
        build("diffusion_gemma").bind(qwen.model, None, ensure_mask_token(qwen.model, None))


def test_noise_may_draw_the_place_of_an_image():
    model = tiny("float32")
    goal = objective(model, eps=0.9).model_copy(update={"vocabulary": 64})
    rows = goal.rows(documents(((60, 4),) * 8), 3)
    assert (rows.token[rows.clean :] == 63).any() and np.isin(rows.token[: rows.clean], 63).sum() == 0
    RowModel(model).collate(rows)
