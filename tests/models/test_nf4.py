"""A base in four bits: the numbers of a base that has its dequantised weights, in a seventh of the memory."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.attention.full import FULL
from tests.models.test_lora import VARIANTS, loaded
from tests.training.tiny import MODEL, config, documents, losses, stop_at, train
from unmask import Trainer
from unmask.errors import UserError
from unmask.export import export
from unmask.models import RowModel, load
from unmask.models.adapters import nf4
from unmask.objectives import build
from unmask.planning.dry_run import plan
from unmask.rows import Document
from unmask.runs.distcp import weights
from unmask.runs.open import open_model

NF4 = ["model.lora.rank=4", "model.lora.alpha=8", "model.lora.quantize=nf4"]
torchao = pytest.importorskip("torchao")


def stored(model):
    """What a checkpoint holds of a model, copied."""
    return {name: tensor.clone() for name, tensor in weights(model).items()}


def test_values_are_levels_times_scales():
    """The definition, bit by bit: two indices a byte, a scale for 64 weights, a factor for the scales of a group."""
    layer = nn.Linear(96, 64, bias=False)
    exact = layer.weight.detach().clone()
    nf4.quantize(layer, "layer", "cpu")
    parts = nf4.stored("w", layer.weight)
    data, z, factor, mean, level = (
        parts[f"w.{name}"]
        for name in ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
    )
    index = torch.stack([data >> 4, data & 15], -1).flatten().long()
    scale = z.view(len(factor), -1) / factor[:, None] + mean
    expected = level[index].view(-1, 64) * scale.view(-1, 1)
    nf4.dequantize(layer)
    assert torch.equal(layer.weight, expected.view(64, 96))
    assert level.sort().values.equal(level) and (level[0], level[-1]) == (-1, 1)
    # Half the widest gap between levels (0.3), times the block's largest weight.
    largest = exact.view(-1, 64).abs().amax(-1, keepdim=True)
    assert ((expected - exact.view(-1, 64)).abs() < 0.17 * largest).all()


@pytest.mark.parametrize("shape, groups", [((512, 2048), 64), ((192, 576), 216), ((8, 8), 1), ((64, 24), 24)])
def test_a_weight_takes_four_bits_and_its_scales(shape, groups):
    """4 + 8/64 + 32/(64 * 256) bits where groups are full: 4.127, beside 17 numbers a tensor."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    nf4.quantize(layer, "layer", "cpu")
    size, count = sum(part.nbytes for part in nf4.stored("", layer.weight).values()), shape[0] * shape[1]
    assert size == count // 2 + count // 64 + 4 * groups + 4 * 17
    if groups == 64:
        assert 8 * size / count == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=6e-4)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dora"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_losses_and_gradients_are_those_of_the_dequantised_weights(variant, dtype, tmp_path):
    settings, model = loaded(tmp_path, variant, dtype=dtype, more=["model.lora.quantize=nf4"])
    plain = load(settings.model_copy(update={"lora": settings.lora.model_copy(update={"quantize": "none"})})).model
    quantised = [name for name, each in model.named_parameters() if nf4.is_nf4(each)]
    assert len(quantised) == (4 if variant == "attention" else 14)
    values = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert not (nf4.is_nf4(parameter) and parameter.requires_grad)
            values[name].copy_(parameter.get_original_weight() if nf4.is_nf4(parameter) else parameter)
    ids = np.append(np.random.default_rng(0).integers(0, 63, 23), 63)[::-1].copy()
    objective = build("ar", {})
    found = []
    for each in (model, plain):
        row_model = RowModel(each, skip_last_layer="auto", backend="tiles")
        assert row_model.skips
        batch = row_model.collate(objective.rows([Document(ids, np.arange(24) >= 12, 0)], 0))
        terms = row_model(batch, objective)
        terms.sum.backward()
        gradients = {name: value.grad for name, value in each.named_parameters() if value.grad is not None}
        found.append((float(terms.sum.detach()), gradients))
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    assert found[0][0] == pytest.approx(found[1][0], rel=tolerance)
    assert found[0][1].keys() == found[1][1].keys() and any("lora_A" in name for name in found[0][1])
    for name, gradient in found[0][1].items():
        largest = found[1][1][name].abs().max()
        assert (gradient - found[1][1][name]).abs().max() <= tolerance * max(largest, 1.0), name


@pytest.mark.parametrize("more", [[], ["training.precision=bf16", "checkpoint.asynchronous=true"]])
def test_a_resume_is_exact_and_four_bits_never_move(more, tmp_path):
    options = [*NF4, "model.lora.train=[norms]", "training.ema=0.9", "training.checkpointing=full", *more]
    start = stored(load(config(tmp_path, *options).model, seed=0).model)
    whole = train(tmp_path / "whole", *options)
    train(tmp_path / "run", *options, callbacks=[stop_at(2)])
    again = train(tmp_path / "run", *options)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 4
    opened = open_model(tmp_path / "run").model
    found, wanted, opened = (stored(each) for each in (again.run.model, whole.run.model, opened))
    assert found.keys() == wanted.keys() == opened.keys() and any(key.endswith("quantized_data") for key in found)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight) and torch.equal(opened[name], weight), name
        assert torch.equal(start[name], weight) == (".lora_" not in name and "norm" not in name), name


def test_exports_are_the_adapters_or_dequantised_weights_with_them(tmp_path):
    base = tmp_path / "base"
    load(config(tmp_path).model).model.save_pretrained(base)
    settings = config(tmp_path / "run", *NF4, "optimizer.learning_rate=0.05", "training.steps=6")
    settings.model.name, settings.model.config = str(base), None
    Trainer(config=settings).train(documents())
    ids = torch.tensor([[5, 63, 9, 63, 1, 7]])

    def logits(path, **how):
        return open_model(path, **how).model.eval()(input_ids=ids, use_cache=False, plan=FULL).logits.detach()

    expected = logits(tmp_path / "run")
    adapters = export(tmp_path / "run", tmp_path / "adapters")
    assert {path.name for path in adapters.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert torch.equal(logits(adapters), expected)  # the base is quantised again, from the same weights
    merged = export(tmp_path / "run", tmp_path / "merged", format="hf")
    assert (logits(merged) - expected).abs().max() < 1e-5
    half = export(tmp_path / "run", tmp_path / "half", format="hf", dtype="bfloat16")
    assert 1e-5 < (logits(half) - expected).abs().max() < 0.1


def test_memory_before_the_first_step_is_that_of_four_bits(tmp_path):
    model = load(config(tmp_path, *NF4).model).model
    held = sum(part.nbytes for part in weights(model).values())
    facts = {}
    more = {"nf4": [], "none": ["model.lora.quantize=none"], "divided": ["parallel.shard_size=2"]}
    for name, options in more.items():
        settings = config(tmp_path, *NF4, *options)
        settings.data.train = written(tmp_path)
        facts[name] = plan(settings)
    assert facts["nf4"]["parameters"] == facts["none"]["parameters"]
    assert facts["nf4"]["gradient_bytes"] == facts["none"]["gradient_bytes"]
    buffers = sum(each.nbytes for each in model.buffers())
    assert facts["divided"]["parameter_bytes"] == pytest.approx(facts["nf4"]["parameter_bytes"] / 2, rel=0.01)
    assert facts["nf4"]["parameter_bytes"] == pytest.approx(held + buffers, abs=14 * 8 + buffers)
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * MODEL["intermediate_size"])
    saved = facts["none"]["parameter_bytes"] - facts["nf4"]["parameter_bytes"]
    assert saved == pytest.approx(linear * (4 - 4.2 / 8), rel=0.03)


def written(path):
    import json

    (path / "ids.jsonl").write_text("\n".join(json.dumps(record) for record in documents()))
    return str(path / "ids.jsonl")


@pytest.mark.parametrize(
    "options, said",
    [
        (
            ["parallel.shard_size=16", "training.batch_size=16"],
            r"q_proj.*\(32, 32\) is in four bits and cannot be divided into 16",
        ),
        (["model.config.intermediate_size=33"], "layers.0.mlp.gate_proj has 1,056 weights, .* leave gate_proj out of"),
        ([], "needs torchao"),
    ],
)
def test_what_cannot_be_is_refused(options, said, tmp_path, monkeypatch):
    from unmask.training.setup import prepare

    if not options:
        monkeypatch.setitem(sys.modules, nf4._TORCHAO, None)
    with pytest.raises(UserError, match=said):
        prepare(config(tmp_path, *NF4, *options), [{"input_ids": list(range(40))}])
