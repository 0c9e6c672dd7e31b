"""What a miniature proves of a model, without its weights: what is true of it, and nothing that is not."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.families import FAMILIES
from unmask.attention import NAME, register
from unmask.models.decoder import spec_of
from unmask.models.load import adapt
from unmask.models.prove import LAYERS, miniature, proofs_of


def empty(fields, dtype=torch.float32):
    """The model on `meta`."""
    register()
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    adapt(model)
    return model


def proven(fields, dtype=torch.float32):
    """(kinds of fused forms, whether the last layer skips) that are proven of the model."""
    proofs = proofs_of(empty(fields, dtype))
    return {kind for (kind, _), fits in proofs.tried.items() if fits}, proofs.skips


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "kinds", "skips"),
    [
        ("qwen3", {"attention", "rms_norm", "swiglu"}, True),
        ("qwen2", {"attention", "rms_norm", "swiglu"}, True),
        ("mistral", {"attention", "rms_norm", "swiglu"}, True),
        ("qwen3_moe", {"attention", "rms_norm"}, True),
        ("gemma2", {"attention"}, False),  # in half precision, too, where small numbers hide that it gates with GELU
        ("cohere", {"swiglu"}, False),  # rotates neighbours, and has one norm a layer
    ],
)
def test_a_model_on_meta(family, kinds, skips, dtype):
    fields = FAMILIES.get(family, {**FAMILIES["llama"], "model_type": family})
    assert proven(fields, dtype) == (kinds, skips)


@pytest.mark.parametrize(("original", "scales"), [(64, False), (16, True)])
def test_what_attention_makes_of_far_positions_counts(original, scales):
    """Ministral's queries grow beyond so many positions, of 64: a fused form that does not know it is not proven."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": original, "max_position_embeddings": 64}
    kinds, skips = proven({**FAMILIES["llama"], "model_type": "ministral3", "rope_parameters": rope})
    assert ("attention" in kinds, skips) == (not scales, not scales)


def test_a_miniature_has_every_layer_or_its_own_width():
    small = miniature(empty({**FAMILIES["qwen3"], "hidden_size": 512, "vocab_size": 9000}), ranks=2)
    assert (small.config.hidden_size, small.config.vocab_size, len(small.model.layers)) == (32, 17, 3)
    assert small.model.layers[2].mlp.up_proj.weight.shape == (16, 32)
    # Persimmon's heads share its width, whatever head_dim is.
    model = empty({**FAMILIES["qwen2"], "model_type": "persimmon", "hidden_size": 64})
    small = miniature(model)
    assert (small.config.hidden_size, len(small.model.layers)) == (64, LAYERS)
    assert spec_of(small).attention == spec_of(model).attention[:LAYERS]
