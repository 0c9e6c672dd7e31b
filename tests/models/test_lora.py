"""Adapters: the model that trains is peft's own in plain transformers; what is saved opens with peft, or merged."""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from tests.attention.full import FULL
from tests.models.diffusion_gemma_config import CONFIG
from tests.training.tiny import config, documents, losses, stop_at, train, weights
from unmask import Trainer
from unmask.config import AdapterConfig
from unmask.errors import UserError
from unmask.export import export
from unmask.export.hf import write as write_whole
from unmask.export.peft import write as write_adapters
from unmask.models import RowModel, load
from unmask.models.adapters import nf4
from unmask.models.adapters.lora import adapters_of, merge
from unmask.objectives import build
from unmask.rows import Document
from unmask.runs.open import OpenModel, open_model

LORA = ["model.lora.rank=4", "model.lora.alpha=8", "model.dtype=float64"]
VARIANTS = {
    "lora": [],
    "dora": ["model.lora.dora=true", "model.lora.train=[norms]"],
    "attention": ["model.lora.rslora=true", "model.lora.targets=[q_proj,v_proj]", "model.lora.train=[embeddings]"],
    "mask token": ["model.lora.train=[mask_token]"],
}
FAMILIES = {
    "qwen3": {},
    "llama untied": {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
FAMILIES |= {
    "dense layer": FAMILIES["experts"] | {"mlp_only_layers": [0]},
    "shared experts": {
        "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    },
}  # fmt: skip


def loaded(tmp_path, variant, family="qwen3", dtype="float64", more=()):
    """A model with adapters whose B is not zero."""
    options = [*LORA, *VARIANTS[variant], f"model.dtype={dtype}", *more]
    settings = config(tmp_path, *options, model=FAMILIES[family]).model
    return settings, with_adapters(load(settings).model)


def with_adapters(model):
    """The model after random numbers were added to its B."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "tokens_delta" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family, variant", [*(("qwen3", name) for name in VARIANTS), ("llama untied", "dora"),
                                             ("llama untied", "mask token"), ("experts", "lora")])  # fmt: skip
def test_gradients_are_those_of_peft_in_plain_transformers(family, variant, dtype, tmp_path):
    """Fused modules and the last layer for labelled rows, against peft's model and autograd's cross-entropy."""
    settings, model = loaded(tmp_path, variant, family, dtype)
    ids = np.append(np.random.default_rng(0).integers(0, 63, 23), 63)[::-1].copy()
    objective = build("ar", {})
    rows = objective.rows([Document(ids, np.arange(24) >= 12, 0)], 0)
    row_model = RowModel(model, skip_last_layer="auto", backend="tiles")
    assert row_model.skips
    batch = row_model.collate(rows)
    terms = row_model(batch, objective)
    terms.sum.backward()

    plain = load(settings.model_copy(update={"fused": False})).model
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    token = torch.from_numpy(ids)[None]
    logits = plain(input_ids=token, use_cache=False).logits[0, 11:-1]
    expected = torch.nn.functional.cross_entropy(logits, token[0, 12:], reduction="sum")
    expected.backward()
    tolerance = 5e-6 if dtype == "float64" else 2e-4  # transformers' norms round to fp32 in any case
    assert float(terms.sum.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    ours = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    theirs = {name: each.grad for name, each in plain.named_parameters() if each.requires_grad}
    assert ours and ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        if theirs[name] is None:
            assert gradient is None, name
            continue
        largest = theirs[name].abs().max()
        assert (gradient - theirs[name]).abs().max() <= tolerance * max(largest, 1.0), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_adapters_and_extras_move_and_a_resume_is_exact(variant, tmp_path):
    options = [*LORA, *VARIANTS[variant], "training.ema=0.9"]
    whole = train(tmp_path / "whole", *options)
    start = load(whole.config.model, seed=0).model
    trained = {name for name, each in start.named_parameters() if each.requires_grad}
    assert trained == set(whole.engine.ema.average)
    held = {id(each) for group in whole.engine.optimizer.param_groups for each in group["params"]}
    assert len(held) == len(trained)
    for name, before in start.named_parameters():
        assert torch.equal(weights(whole)[name], before) == (name not in trained), name
    train(tmp_path / "run", *options, callbacks=[stop_at(2)])
    again = train(tmp_path / "run", *options)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(again)[name], weight), name
    opened = open_model(tmp_path / "run").model
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, weights(whole)[name]), name


@pytest.mark.parametrize(
    "options, said",
    [
        (["model.lora.alpha=8"], "model.lora.rank is 0"),
        (["model.lora.rank=2", "model.lora.targets=[q_prj]"], "did you mean 'q_proj'"),
        (["model.lora.rank=2", "model.lora.train=[embeddings,mask_token]"], "leave mask_token out"),
    ],
)
def test_what_does_not_go_together_is_refused(options, said, tmp_path):
    from unmask.training.setup import prepare

    with pytest.raises(UserError, match=said):
        prepare(config(tmp_path, *options), [{"input_ids": list(range(40))}])


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_open_with_peft_and_merged_with_transformers(variant, tmp_path):
    """The same logits from the run, from peft on the base, from the folder of adapters and from the merged model."""
    from peft import PeftModel

    base = tmp_path / "base"
    model = load(config(tmp_path).model).model
    model.save_pretrained(base)
    overrides = [*LORA, *VARIANTS[variant], "optimizer.learning_rate=0.05", "training.steps=8"]
    settings = config(tmp_path / "run", *overrides)
    settings.model.name, settings.model.config = str(base), None
    Trainer(config=settings).train(documents())
    run = open_model(tmp_path / "run")
    ids = torch.tensor([[5, 63, 9, 63, 1, 7]])

    def logits(model, **how):
        return model.eval()(input_ids=ids, use_cache=False, **how).logits.detach()

    expected = logits(run.model, plan=FULL)
    plain = load(settings.model.model_copy(update={"lora": AdapterConfig()})).model
    assert (expected - logits(plain, plan=FULL)).abs().max() > 1e-2
    adapters = export(tmp_path / "run", tmp_path / "adapters")
    assert {path.name for path in adapters.glob("*.safetensors")} == {"adapter_model.safetensors"}
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    theirs = logits(PeftModel.from_pretrained(fresh, adapters, autocast_adapter_dtype=False), attention_mask=mask)
    assert (theirs - expected).abs().max() < 1e-5
    again = open_model(adapters)
    assert torch.equal(logits(again.model, plan=FULL), expected) and again.objective == run.objective
    for source, name in ((tmp_path / "run", "a"), (adapters, "b")):
        merged = export(source, tmp_path / name, format="hf")
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
        assert (logits(whole, attention_mask=mask) - expected).abs().max() < 1e-5
        assert not any("lora" in key for key in whole.state_dict())


@pytest.mark.parametrize("mixture, options", [
    ("dense layer", ["model.lora.train=[mask_token]", "model.lora.dropout=0.1"]), ("shared experts", []),
    ("shared experts", ["model.lora.targets=[up_proj]"]), ("shared experts", ["model.lora.dora=true"]),
])  # fmt: skip
def test_of_a_mixture_dense_layers_and_shared_experts_get_adapters(mixture, options, tmp_path):
    """peft moves names of a mixture's projections to its stacked experts: here never, and not when it opens ours."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(target|pattern).*")
        settings, model = loaded(tmp_path, "lora", mixture, more=options)
    dense = {
        f"model.layers.{at}.{name}_proj" for at in ("0.mlp", "1.mlp.shared_experts") for name in ("gate", "up", "down")
    }
    linear = {f"model.layers.{at}.self_attn.{name}_proj" for at in (0, 1) for name in "qkvo"} | dense
    linear = {name for name in linear if "targets" not in str(options) or "up_proj" in name}
    found = {name for name, each in adapters_of(model).items() if "embed" not in name and name != "lm_head"}
    assert found == (linear if mixture == "shared experts" else {name for name in linear if "shared" not in name})

    base = tmp_path / "base"
    plain = load(settings.model_copy(update={"lora": AdapterConfig()})).model
    plain.save_pretrained(base)
    ids = torch.tensor([[5, 63, 9, 63, 1, 7]])
    expected = model.eval()(input_ids=ids, use_cache=False, plan=FULL).logits.detach()
    opened = OpenModel(model, None, 63, build("mdlm", {}), settings.model_copy(update={"name": str(base)}))
    adapters = tmp_path / "adapters"
    write_adapters(opened, adapters)
    assert torch.equal(open_model(adapters).model(input_ids=ids, use_cache=False, plan=FULL).logits, expected)
    fresh, mask = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), torch.zeros(1, 1, 6, 6).double()
    fresh.set_experts_implementation("eager")
    if "dora" in str(options):
        with pytest.raises(ValueError, match="use_dora"):
            PeftModel.from_pretrained(fresh, adapters)
    else:
        theirs = PeftModel.from_pretrained(fresh, adapters, autocast_adapter_dtype=False).eval()
        logits = theirs(input_ids=ids, use_cache=False, attention_mask=mask).logits
        assert (logits - expected).abs().max() < 1e-5
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    merge(model)
    for name, weight in model.named_parameters():
        path = name.removesuffix(".weight")
        if path not in found:
            continue
        a, b = (whole[f"{path}.lora_{each}.default.weight"] for each in "AB")
        wanted = whole[f"{path}.base_layer.weight"] + 2 * b @ a
        if "dora" in str(options):
            magnitude = whole[f"{path}.lora_magnitude_vector.default.weight"]
            wanted = wanted * (magnitude / wanted.norm(dim=1))[:, None]
        assert (weight - wanted).abs().max() < 1e-12, name
    assert not any("lora" in name for name in model.state_dict())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert (model(input_ids=ids, use_cache=False, plan=FULL).logits - expected).abs().max() < 1e-5


def test_four_bits_go_where_adapters_go(tmp_path):
    options = ["model.lora.quantize=nf4", "model.lora.targets=[up_proj]"]
    _, model = loaded(tmp_path, "lora", "shared experts", "float32", options)
    four = {name.removesuffix(".base_layer.weight") for name, each in model.named_parameters() if nf4.is_nf4(each)}
    assert (
        four == adapters_of(model).keys() == {f"model.layers.{at}.up_proj" for at in ("0.mlp", "1.mlp.shared_experts")}
    )


def test_diffusion_gemma_keeps_its_routers(tmp_path):
    """Its objective, two passes and all; a run that goes on from half its steps is the whole one."""
    options = [*LORA, "data.pack_tokens=32", "training.steps=4", "checkpoint.every=2"]
    base = {"model": CONFIG, "objective": {"name": "diffusion_gemma", "block_size": 4}}
    summary = Trainer(config=config(tmp_path / "whole", *options, **base)).train(documents(8))
    model = open_model(summary.checkpoint).model
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained and all(".lora_" in name and "router" not in name for name in trained)
    assert any(each.abs().max() > 0 for name, each in model.named_parameters() if "lora_B" in name)

    stopped = config(tmp_path / "parts", *options, **base)
    Trainer(config=stopped, callbacks=[stop_at(2)]).train(documents(8))
    resumed = Trainer(config=stopped).train(documents(8))
    ours, wanted = (dict(open_model(each.checkpoint).model.named_parameters()) for each in (resumed, summary))
    assert resumed.step == 4 and ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("more", [[], ["model.lora.dora=true"], ["model.lora.quantize=nf4"]])
def test_diffusion_gemma_merged_opens_with_transformers(more, tmp_path):
    """The folder's weights are W + s B A, and its logits those of the model with adapters."""
    settings = config(tmp_path, "model.lora.rank=4", "model.dtype=float32", *more, model=CONFIG).model
    model = with_adapters(load(settings).model).eval()
    ids = torch.tensor([[5, 6, 9, 11, 1, 7]])
    expected = model(input_ids=ids, use_cache=False, plan=FULL).logits.detach()
    layer = model.base_model.layers[1].self_attn.q_proj
    wanted = (layer.base_layer.weight.to(torch.float32) + layer.get_delta_weight("default")).detach()
    opened = OpenModel(model, None, None, build("diffusion_gemma", {"block_size": 4}), settings)
    (tmp_path / "merged").mkdir()
    write_whole(opened, tmp_path / "merged")
    whole, info = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    if not more or "nf4" in more[0]:
        assert torch.allclose(whole.model.decoder.layers[1].self_attn.q_proj.weight, wanted, atol=1e-6)
    again = open_model(tmp_path / "merged").model
    assert (again(input_ids=ids, use_cache=False, plan=FULL).logits - expected).abs().max() < 1e-4


def test_no_mask_token_to_train(tmp_path):
    settings = config(tmp_path, *LORA, "model.lora.train=[mask_token]", model=CONFIG).model
    with pytest.raises(UserError, match="has no mask token"):
        load(settings.model_copy(update={"mask_token_id": None}))
