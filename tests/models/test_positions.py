"""Rotary positions are a function of the document, and longer documents than they hold for are refused by name."""

import numpy as np
import pytest
import torch

from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models import load
from unmask.models.positions import check_positions, limit_of

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
#: With the longest document: frequencies of transformers change from the next one on.
KINDS = {
    "longrope": ({"model_type": "phi3", "rope_parameters": {**LONGROPE, "rope_theta": 1e4},
                  "original_max_position_embeddings": 16}, 16),
    "dynamic": ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
                64),
}  # fmt: skip


def made(kind):
    fields, limit = KINDS[kind]
    return load(ModelConfig(config={**SHAPE, **fields}, mask_token_id=39)).model.eval(), limit


@pytest.mark.parametrize("kind", KINDS)
def test_angles_do_not_depend_on_what_else_is_in_the_pass(kind):
    """cos and sin of the formula, position * inv_freq of the short factors, beside a longer document and after one."""
    model, limit = made(kind)
    rotary, x = model.base_model.rotary_emb, torch.zeros(1, 1, 16)
    alone = rotary(x, torch.arange(8)[None])
    frequencies = 1e4 ** (-np.arange(0, 8, 2) / 8)
    scale = np.sqrt(1 + np.log(64 / 16) / np.log(16)) if kind == "longrope" else 1.0
    expected = scale * np.cos(np.arange(8)[:, None] * np.tile(frequencies, 2))
    torch.testing.assert_close(alone[0][0].double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
    beside = rotary(x, torch.tensor([[*range(8), limit + 5]]))
    assert torch.equal(beside[0][:, :8], alone[0]) and torch.equal(beside[1][:, :8], alone[1])
    assert torch.equal(rotary(x, torch.arange(8)[None])[0], alone[0])  # it keeps no memory of the longer one


@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_limit_it_is_transformers(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    model, limit = made(kind)
    fields = {**SHAPE, **KINDS[kind][0]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = AutoModelForCausalLM.from_config(config).model.rotary_emb
    given = torch.zeros(1, 1, 16), torch.arange(limit)[None]
    for got, wanted in zip(model.base_model.rotary_emb(*given), theirs(*given), strict=True):
        assert torch.equal(got, wanted)
    given = torch.zeros(1, 1, 16), torch.arange(limit + 1)[None]
    assert not torch.equal(model.base_model.rotary_emb(*given)[0], theirs(*given)[0])  # why it ends there


@pytest.mark.parametrize("kind", KINDS)
def test_longer_documents_are_refused_by_name(kind):
    model, limit = made(kind)
    assert limit_of(model.config).tokens == limit
    check_positions(model, limit, "data", "data.pack_tokens")
    name = "original_max_position_embeddings: .*longrope" if kind == "longrope" else "max_position_embeddings"
    with pytest.raises(UserError, match=rf"data: .* {limit + 1} tokens, and the model {limit} positions \({name}"):
        check_positions(model, limit + 1, "data", "data.pack_tokens")
