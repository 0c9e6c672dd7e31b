"""The description of a decoder: from a configuration alone what the model itself says, and made once."""

import pytest

from tests.models.diffusion_gemma_config import CONFIG
from tests.models.families import FAMILIES, spec_of_config, tiny
from unmask.config import ModelConfig
from unmask.models import decoder, load
from unmask.models.decoder import Attention, Experts, spec_of

UNFIT = {**FAMILIES["llama"], "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2}
PLANS = {
    "qwen3": {"layers.2.self_attn.k_proj": 16, "layers.2.mlp.up_proj": 24},
    "qwen3_moe": "layers.0.mlp.experts is divided as 'moe_tp_experts' in the plan of Qwen3MoeForCausalLM",
}


@pytest.mark.parametrize("fields", [*FAMILIES.values(), UNFIT, CONFIG], ids=lambda fields: fields["model_type"])
def test_a_configuration_tells_what_its_model_tells(fields):
    spec = spec_of(load(ModelConfig(config=fields, fused=False), masked=False).model)
    assert spec == spec_of_config(**fields)


def test_what_it_says():
    spec = spec_of(tiny("qwen3_moe"))
    assert spec.attention == (Attention(None, 4, 2, 8),) * 3 and spec.layers[1] == "model.layers.1"
    assert (
        spec.experts["model.layers.2.mlp.experts"] == Experts(4, None) and spec.routers[0] == "model.layers.0.mlp.gate"
    )
    assert (spec.kind, spec.width, spec.rotary) == ("Qwen3MoeForCausalLM", 16, "model.rotary_emb")
    assert spec.tensor == PLANS["qwen3_moe"]
    plan = spec_of(tiny("qwen3")).tensor
    assert {name: plan.columns[name] for name in PLANS["qwen3"]} == PLANS["qwen3"]
    assert plan.rows["layers.0.self_attn.o_proj"] == 32 and plan.regions[:2] == ("layers.0.self_attn", "layers.0.mlp")


def test_a_model_is_asked_once_and_adapters_are_counted(monkeypatch):
    asked = []
    probed = decoder._probed
    monkeypatch.setattr(decoder, "_probed", lambda model: asked.append(model) or probed(model))
    config = {"config": FAMILIES["qwen3"], "mask_token_id": 3}
    plain = spec_of(load(ModelConfig(**config)).model)
    assert len(asked) == 2  # the model and its miniature
    adapted = spec_of(load(ModelConfig(**config, lora={"rank": 2, "targets": ["v_proj"]})).model)
    assert adapted.linear == plain.linear + 3 * 2 * (16 + 16) and adapted.attention == plain.attention
