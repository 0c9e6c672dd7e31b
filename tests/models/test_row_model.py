"""RowModel against transformers' own models under dense masks: hidden states, loss and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.families import FAMILIES, MASK, OBJECTIVES, WINDOW, rows_of, stock, stock_hidden, tiny
from tests.objectives.clipped import Clipped
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models import RowModel, load
from unmask.models.fused.fuse import fuse
from unmask.models.prove import proofs_of
from unmask.objectives import Objective
from unmask.rows import IGNORE, Document, Rows, inert, padded

#: Routers take their softmax in fp32 whatever the dtype.
TOLERANCE = {"qwen3_moe": 1e-6}


def run(model: RowModel, objective: Objective, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a pack."""
    batch = model.collate(rows)
    terms = model(batch, objective)
    loss = terms.sum / terms.count
    loss.backward()
    grads = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def expected(twin: Any, objective: Objective, rows: Rows, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by whole logits, weights and autograd."""
    logits = twin.lm_head(hidden[rows.labelled])
    if objective.excluded_token is not None:
        keep = torch.ones(logits.shape[-1], dtype=torch.bool)
        keep[objective.excluded_token] = False
        logits = logits.masked_fill(~keep, float("-inf"))
    nll = torch.nn.functional.cross_entropy(logits, torch.from_numpy(rows.label[rows.labelled]), reduction="none")
    loss = (nll * torch.from_numpy(rows.weight[rows.labelled])).sum() / rows.count
    twin.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def same_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    assert largest > 1e-3
    for name, x in wanted.items():
        difference = float((got[name].double() - x.double()).abs().max())
        assert difference < tolerance * max(float(x.abs().max()), 1e-2 * largest), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stock_model_under_a_dense_mask(family: str) -> None:
    model = tiny(family)
    root, twin = RowModel(model), stock(model)
    tolerance = TOLERANCE.get(family, 1e-11)
    for name in OBJECTIVES:
        objective, rows = rows_of(name)
        reference = stock_hidden(twin, rows)
        batch = root.collate(rows)
        hidden = root.hidden(batch)
        torch.testing.assert_close(hidden, reference[rows.labelled], rtol=tolerance, atol=tolerance)
        loss, grads = run(root, objective, rows)
        wanted, wanted_grads = expected(twin, objective, rows, reference)
        torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)
        same_gradients(grads, wanted_grads, 10 * tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_found_by_asking_the_layers(family: str) -> None:
    expected = {
        "mistral": [WINDOW] * 3,
        "qwen3_sliding": [None, WINDOW, WINDOW],
        "gemma3": [WINDOW, None, WINDOW],
    }
    root = RowModel(tiny(family))
    assert list(root.decoder.windows) == expected.get(family, [None] * 3)
    assert root.shape.windows == root.decoder.windows


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_ar_is_the_models_own_causal_loss(family: str) -> None:
    """One document through transformers' causal mask and its own loss: nothing of ours but the rows."""
    model = tiny(family)
    twin = stock(model)
    objective, rows = rows_of("ar", lengths=(17,))
    root = RowModel(model)
    loss, grads = run(root, objective, rows)
    token = torch.from_numpy(rows.token)[None]
    label = token.clone()
    label[:, :3] = -100  # the prompt of rows_of
    own = twin(input_ids=token, labels=label, use_cache=False).loss
    own.backward()
    # transformers' loss takes its logits in fp32.
    torch.testing.assert_close(loss.float(), own.detach().float(), rtol=1e-6, atol=1e-6)
    same_gradients(grads, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}, 2e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "qwen3_sliding", "qwen3_moe"])
def test_the_last_layer_skip_changes_nothing(family: str) -> None:
    model = tiny(family)
    packs = {name: rows_of(name) for name in OBJECTIVES}
    plain = {name: run(RowModel(model), *pack) for name, pack in packs.items()}
    root = RowModel(model, skip_last_layer=True)
    tolerance = TOLERANCE.get(family, 1e-11)
    for name, (objective, rows) in packs.items():
        assert root.skips and root.collate(rows).once.plan.labelled is not None
        loss, grads = run(root, objective, rows)
        torch.testing.assert_close(loss, plain[name][0], rtol=tolerance, atol=tolerance)
        same_gradients(grads, plain[name][1], 10 * tolerance)


def test_a_skip_that_is_not_proven_is_refused_or_left_out() -> None:
    """Gemma's layer has norms that Llama's has not: the short form would not give its result."""
    objective, rows = rows_of("block_diffusion")
    with pytest.raises(UserError, match="model.skip_last_layer=true: not proven for Gemma3ForCausalLM"):
        RowModel(tiny("gemma3"), skip_last_layer=True)
    root = RowModel(tiny("gemma3"), skip_last_layer="auto")
    assert not root.skips
    assert torch.equal(run(root, objective, rows)[0], run(RowModel(tiny("gemma3")), objective, rows)[0])


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_fused_kernels_change_nothing(family: str) -> None:
    objective, rows = rows_of("block_diffusion")
    plain = run(RowModel(tiny(family, "float32", fused=False)), objective, rows)
    fused = run(RowModel(tiny(family, "float32", fused=True), skip_last_layer="auto"), objective, rows)
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-5)
    same_gradients(fused[1], plain[1], 2e-4)


def fused(model: Any) -> dict[str, int]:
    return fuse(model, proofs_of(model))


def test_what_is_fused() -> None:
    norms = 2 * 3 + 2 * 3 + 1  # two a layer, query and key norms, the last one
    assert fused(tiny("qwen3", "float32", fused=False)) == {
        "attention": 3,
        "rms_norm": norms,
        "plain_rms_norm": 0,
        "swiglu": 3,
    }
    assert fused(tiny("llama", "float32", fused=False)) == {
        "attention": 3,
        "rms_norm": 2 * 3 + 1,
        "plain_rms_norm": 0,
        "swiglu": 3,
    }
    # Gemma rotates by layer type, scales by 1 + weight and gates with GELU: no kernel is its own module's function.
    assert fused(tiny("gemma3", "float32", fused=False)) == {
        "attention": 0,
        "rms_norm": 0,
        "plain_rms_norm": 0,
        "swiglu": 0,
    }


@pytest.mark.parametrize("backend", ["tiles", "reference"])
def test_single_likelihoods_come_without_gradient_and_in_the_order_of_the_rows(backend: str) -> None:
    objective, rows = rows_of("block_diffusion")
    model = tiny("llama")
    root = RowModel(model, backend=backend)
    nll = root(root.collate(rows), objective, per_row=True)
    assert not nll.requires_grad and nll.shape == (len(rows.labelled),)
    logits = stock(model).lm_head(stock_hidden(stock(model), rows)[rows.labelled]).detach()
    logits[:, MASK] = float("-inf")
    label = torch.from_numpy(rows.label[rows.labelled])
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(logits, label, reduction="none"))
    terms = root(root.collate(rows), objective)
    torch.testing.assert_close(terms.sum.detach(), (nll * torch.from_numpy(rows.weight[rows.labelled])).sum())
    assert terms.count == rows.count
    assert float(terms.metrics["labelled"]) == len(rows.labelled)
    torch.testing.assert_close(terms.metrics["nll_sum"], nll.sum())


def clipped_rows() -> tuple[Objective, Rows]:
    """Two documents without the mask token, the first with a prompt."""
    objective = Clipped(block_size=4, mask_token_id=MASK)
    documents = [Document(np.arange(5, 18), np.arange(13) > 2, 0), Document(np.arange(30, 36), np.ones(6, bool), 1)]
    return objective, objective.rows(documents, 0)


def clipped_loss(logits: Tensor, rows: Rows) -> Tensor:
    """`tests.objectives.clipped`, of whole logits of the labelled rows, row by row."""
    total = logits.new_zeros(())
    for z, row in zip(logits, rows.labelled, strict=True):
        log_prob = z[rows.label[row]] - z[torch.arange(len(z)) != MASK].logsumexp(0)
        old, reference = rows.columns["log_probs"][row]
        ratio, advantage = (log_prob - old).exp(), float(rows.columns["advantage"][row])
        bounded = ratio if 0.8 < ratio < 1.2 else ratio.detach().clamp(0.8, 1.2)
        worse = torch.minimum(ratio * advantage, bounded * advantage)
        penalty = (reference - log_prob).exp() - (reference - log_prob) - 1
        total = total + rows.weight[row] * (0.1 * penalty - worse)
    return total


@pytest.mark.parametrize("skip", [False, True])
def test_a_loss_over_columns_is_its_formula(skip: bool) -> None:
    model = tiny("qwen3")
    objective, rows = clipped_rows()
    root, twin = RowModel(model, skip_last_layer=skip), stock(model)
    loss, grads = run(root, objective, rows.pruned())
    wanted = clipped_loss(twin.lm_head(stock_hidden(twin, rows)[rows.labelled]), rows) / rows.count
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-11, atol=1e-11)
    same_gradients(grads, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}, 1e-10)
    scores = root(root.collate(rows), objective, per_row=True)
    assert not scores.requires_grad
    weight = torch.from_numpy(rows.weight[rows.labelled])
    torch.testing.assert_close((weight * scores).sum() / rows.count, loss)


def test_a_column_that_rows_lack_is_named_and_a_batch_of_none_needs_none() -> None:
    (objective, rows), root = clipped_rows(), RowModel(tiny("qwen3"))
    with pytest.raises(UserError, match="Clipped reads the column 'advantage', which its rows do not have"):
        root(root.collate(replace(rows, columns={})), objective)
    batch = root.collate(inert(0.0))
    terms = root(batch, objective)
    terms.sum.backward()
    assert float(terms.sum.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in root.parameters())


def test_pruned_and_padded_rows_give_the_same_loss_and_gradients() -> None:
    objective, rows = rows_of("block_diffusion")
    root = RowModel(tiny("mistral"), skip_last_layer=True)
    loss, grads = run(root, objective, rows)
    assert len(rows.pruned()) < len(rows)
    for other in (rows.pruned(), padded(rows, 64), padded(rows.pruned(), 7)):
        got, got_grads = run(root, objective, other)
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
        same_gradients(got_grads, grads, 1e-11)


@pytest.mark.parametrize("skip", [False, True])
def test_a_pack_without_labels_costs_nothing_and_still_reaches_every_parameter(skip: bool) -> None:
    objective, rows = rows_of("block_diffusion")
    silent = replace(rows, label=np.full(len(rows), IGNORE))
    root = RowModel(tiny("llama", "float32"), skip_last_layer=skip)
    batch = root.collate(silent)
    terms = root(batch, objective)
    assert float(terms.sum.detach()) == 0.0
    terms.sum.backward()
    assert all(p.grad is not None and not p.grad.any() for p in root.parameters())


def test_shape_counts_what_a_row_passes_through() -> None:
    """By hand: Llama's matrices, and of Qwen3-MoE the two experts of four that a row meets, and the router."""
    attention = 16 * 8 * 4 * 2 + 16 * 8 * 2 * 2
    llama = RowModel(tiny("llama")).shape
    assert llama.linear == 3 * (attention + 3 * 16 * 24)
    assert (llama.head, llama.query_width) == (40 * 16, 32)
    moe = RowModel(tiny("qwen3_moe")).shape
    assert moe.linear == 3 * (attention + 4 * 16 + 2 * 3 * 16 * 12)
    assert RowModel(tiny("qwen2")).shape.query_width == 16


def test_a_last_layer_that_skips_counts_as_what_it_computes() -> None:
    """By hand: of the last layer only keys and values are computed for every row."""
    kv, rest = 16 * 8 * 2 * 2, 16 * 8 * 4 * 2 + 3 * 16 * 24
    skipping = RowModel(tiny("llama"), skip_last_layer=True).shape
    assert skipping.linear == 2 * (kv + rest) + kv
    assert (skipping.head, skipping.skips) == (rest + 40 * 16, True)
    moe = RowModel(tiny("qwen3_moe"), skip_last_layer="auto")
    assert moe.skips and moe.shape.head == 16 * 8 * 4 * 2 + 4 * 16 + 2 * 3 * 16 * 12 + 40 * 16


def test_a_head_that_is_more_than_a_projection_is_refused() -> None:
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    for kind, name in (("cohere", "CohereForCausalLM"), ("granite", "GraniteForCausalLM")):
        extra = {"logits_scaling": 4.0} if kind == "granite" else {"logit_scale": 0.25}
        model = load(ModelConfig(config={"model_type": kind, **shape, **extra, "pad_token_id": 0})).model
        with pytest.raises(UserError, match=f"{name} does not apply its head as a plain projection"):
            RowModel(model)


def test_the_models_own_soft_cap_is_applied() -> None:
    objective, rows = rows_of("block_diffusion")
    model = tiny("gemma3", final_logit_softcapping=2.0)
    root = RowModel(model)
    assert root.head().softcap == 2.0
    nll = root(root.collate(rows), objective, per_row=True)
    logits = 2.0 * torch.tanh(stock(model).lm_head(stock_hidden(stock(model), rows)[rows.labelled]).detach() / 2.0)
    logits[:, MASK] = float("-inf")
    label = torch.from_numpy(rows.label[rows.labelled])
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(logits, label, reduction="none"))


def test_packed_documents_equal_the_same_documents_alone() -> None:
    root = RowModel(tiny("qwen3"))
    objective, rows = rows_of("fast_dllm_v2", (13, 6))
    together = root(root.collate(rows), objective, per_row=True)
    document = rows.document[rows.labelled]
    for number, length in enumerate((13, 6)):
        token = rows.token[: rows.clean][rows.document[: rows.clean] == number]
        assert len(token) == length
        alone = rows.take(np.flatnonzero(rows.document == number))
        shift = int((rows.document[: rows.clean] < number).sum())
        alone = replace(alone, lo=alone.lo - shift, hi=alone.hi - shift)
        alone.check()
        single = root(root.collate(alone), objective, per_row=True)
        torch.testing.assert_close(single, together[torch.from_numpy(document == number)])
