"""Loading from a folder, a GGUF file or a configuration; every model we cannot train is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.full import FULL
from tests.models.families import FAMILIES
from unmask import Trainer
from unmask.attention import NAME
from unmask.config import Config, ModelConfig
from unmask.convert import convert
from unmask.data import load_tokenizer
from unmask.errors import UserError
from unmask.models import load
from unmask.runs.open import open_model

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,
}


def from_config(**fields: Any) -> Any:
    return load(ModelConfig(config=fields, mask_token_id=3))


def test_random_weights_are_a_function_of_the_seed_alone() -> None:
    config = ModelConfig(config=FAMILIES["qwen3"], mask_token_id=3)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = load(config, seed=1).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was moved"
    again, other = load(config, seed=1).model.state_dict(), load(config, seed=2).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_loaded_model_is_ready_for_rows() -> None:
    model, tokenizer, mask = from_config(model_type="llama", **SHAPE)
    assert tokenizer is None and mask == model.config.mask_token_id == 3
    assert model.config._attn_implementation == NAME
    embedding = model.get_input_embeddings()
    assert embedding.padding_idx is None
    embedding(torch.tensor([0])).sum().backward()
    assert embedding.weight.grad[0].abs().sum() > 0, "the pad token, often EOS, must learn"
    assert load(ModelConfig(config={"model_type": "llama", **SHAPE}, dtype="bfloat16")).model.dtype == torch.bfloat16


def test_vocab_size_fills_what_the_config_leaves_out() -> None:
    fields = {"model_type": "llama", **SHAPE}
    del fields["vocab_size"]
    model = load(ModelConfig(config=fields, mask_token_id=3), vocab_size=30).model
    assert model.get_input_embeddings().weight.shape[0] == 30
    given = ModelConfig(config={**fields, "vocab_size": 35}, mask_token_id=3)
    assert load(given, vocab_size=30).model.get_input_embeddings().weight.shape[0] == 35


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    model = from_config(model_type="qwen3", **SHAPE, tie_word_embeddings=True).model
    model.save_pretrained(tmp_path)
    loaded = load(ModelConfig(name=str(tmp_path)))
    assert loaded.tokenizer is None and loaded.mask_token_id == 3
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in loaded.model.state_dict().items())
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_logits_of_its_weights(tmp_path: Path, tied: bool, capfd: Any) -> None:
    pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    shape["tie_word_embeddings"] = tied
    stock = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    write_gguf(tmp_path / "tiny.gguf", stock)
    capfd.readouterr()
    model, tokenizer, mask = load(ModelConfig(name=str(tmp_path / "tiny.gguf")))
    assert capfd.readouterr().err == "", "a progress bar in a log"
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("abc")) == [28, 2]
    assert mask == len(tokenizer) - 1 == 40 == tokenizer.mask_token_id
    token = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=token[:, -1:], plan=FULL).logits[..., :40],
            stock(input_ids=token[:, -1:]).logits,
            rtol=1e-5,
            atol=1e-5,
        )
        model.set_attn_implementation("sdpa")
        own, expected = model(input_ids=token).logits[..., :40], stock(input_ids=token).logits
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def write_gguf(path: Path, model: Any) -> None:
    """A Llama in llama.cpp's file format: names shortened, query and key rows in the order of its rotary embedding."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz", "<s>", "</s>", "ab", *(f"<{i}>" for i in range(29, 40))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(26)
    writer.add_eos_token_id(27)
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    for name, tensor in model.state_dict().items():
        array, name = tensor.numpy(), name.removesuffix(".weight")
        if name == "lm_head" and config.tie_word_embeddings:
            continue
        if name not in whole:
            _, _, layer, part = name.split(".", 3)
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(parts[part][-1])
            if parts[part] in ("attn_q", "attn_k"):
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            name = f"blk.{layer}.{parts[part]}"
        writer.add_tensor(f"{whole.get(name, name)}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {
                "model_type": "qwen3_next",
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                **LINEAR,
            },
            "layer 0 is linear_attention: unmask trains full and sliding attention only",
        ),
        ({"model_type": "qwen3_5_text", **LINEAR}, "layer 0 is linear_attention"),
        ({"model_type": "llama4_text"}, "layer 0 is chunked_attention"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout=0.1: unmask trains without it"),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, "model.layers.0.self_attn uses attention sinks"),
        ({"model_type": "gemma2"}, "attn_logit_softcapping=50.0: attend does not compute it; set it to 0 or null"),
        ({"model_type": "stablelm"}, "StableLmForCausalLM hands no plan to its attention"),
        ({"model_type": "deepseek_v3", **MLA}, "keys of width 12 and values of width 6: attend needs one width"),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_attention_we_do_not_compute_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        from_config(**{**SHAPE, **fields})


def test_a_layer_that_never_asks_for_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer type we have never heard of: found by asking, not by its name."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def bypass(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self.self_attn.layer_idx == 1 else forward(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", bypass)
    with pytest.raises(UserError, match=r"layer 1 \(LlamaDecoderLayer\) bypasses the attention interface"):
        from_config(model_type="llama", **SHAPE)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match="GPT2LMHeadModel has no decoder layers that unmask knows"):
        from_config(model_type="gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hidden_size": 16}, "model.config: model_type is missing"),
        ({"model_type": "lama"}, "model.config.model_type='lama': transformers has no such model type"),
        (
            {"model_type": "llama", "hiden_size": 16},
            r"model.config: llama has no field 'hiden_size' \(did you mean 'hidden_size'\?\)",
        ),
        ({"model_type": "llama", **SHAPE, "num_attention_heads": 0}, "model.config: llama cannot be built from it"),
        ({"model_type": "t5"}, "model.config: t5 cannot be built from it"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        from_config(**fields)
    assert "\n" not in str(caught.value)


def sentence(name: Path) -> str:
    """The one sentence that refuses to load `name`."""
    with pytest.raises(UserError) as caught:
        load(ModelConfig(name=str(name)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_that_is_damaged_or_lacks_a_weight_is_refused(tmp_path: Path, capfd: Any) -> None:
    from safetensors.torch import load_file, save_file

    from_config(model_type="llama", **SHAPE).model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, state = file.read_bytes(), load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"], state["lm_head.weight"]
    save_file(state, file, metadata={"format": "pt"})
    assert "the checkpoint holds no lm_head.weight and 1 more, which would stay random" in sentence(tmp_path)
    state["lm_head.weight"] = torch.zeros(3, 3)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 16)
    save_file(state, file, metadata={"format": "pt"})
    assert f"{file}: lm_head.weight has the shape [3, 3], config.json says [40, 16]" in sentence(tmp_path)
    state |= {"lm_head.weight": torch.zeros(40, 16), "foo.bar": torch.zeros(2)}
    save_file(state, file, metadata={"format": "pt"})
    assert "holds foo.bar, for which the model has no place" in sentence(tmp_path)
    state |= {"model.norm.weight": torch.zeros(16, dtype=torch.int8)}
    save_file(state, file, metadata={"format": "pt"})
    assert f"{file}: model.norm.weight is stored as I8" in sentence(tmp_path)
    assert "LOAD REPORT" not in capfd.readouterr().err
    file.write_bytes(whole[: len(whole) // 2])
    assert f"{file}: not a safetensors file" in sentence(tmp_path)
    file.write_bytes(whole)
    assert load(ModelConfig(name=str(tmp_path))).mask_token_id == 3


def test_a_name_on_a_hub_is_answered_by_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    way = "hf download Qwen/Qwen3-0.6B-Base --local-dir models/Qwen3-0.6B-Base, and name models/Qwen3-0.6B-Base"
    run = Config.parse({"model": {"name": "Qwen/Qwen3-0.6B-Base"}})
    for asked in (
        lambda name: load(ModelConfig(name=name)),
        open_model,
        load_tokenizer,
        lambda name: convert(name, "out"),
        lambda name: Trainer(config=run).train(["a text"]),
    ):
        with pytest.raises(UserError, match=f"no such .*{way}$"):
            asked("Qwen/Qwen3-0.6B-Base")
    (tmp_path / "runs").mkdir()
    for path in ("runs/first", "./a/b", "first", str(tmp_path / "a" / "b")):
        with pytest.raises(UserError) as caught:
            open_model(path)
        assert "hf download" not in str(caught.value)


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    assert "no such folder or file (models are loaded from disk, not from a hub)" in sentence(tmp_path / "absent")
    assert f"model.name={tmp_path}: no config.json in this folder" in sentence(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    assert "a file must be .gguf; for safetensors name the folder" in sentence(weights)
    (tmp_path / "config.json").write_text('{"model_type": "nothing_we_know"}')
    assert "model_type='nothing_we_know', which transformers does not know" in sentence(tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    assert f"model.name={broken}: transformers cannot load it" in sentence(broken)
    with pytest.raises(UserError, match="give model.name .* or model.config"):
        load(ModelConfig())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 0}, "holds nothing"),
        ({"hidden_size": "a"}, "expected int, got str"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "no decoder layers"),
        ({"head_dim": 7}, "even rotary dimension"),
        ({"hidden_act": "foo"}, "cannot be built from it: it knows no 'foo'"),
        ({"pad_token_id": 70}, "Padding_idx must be within num_embeddings"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding window of 0 tokens"),
    ],
)
def test_values_that_do_not_go_together_are_one_sentence(change: dict[str, object], sentence: str) -> None:
    fields = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with pytest.raises(UserError, match=sentence):
        load(ModelConfig(config=fields | change))
