"""A family with a forward of its own: layers whose attention and MLP read the same rows, one beside the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from unmask.models.families import Transformers


class Config(Qwen3Config):
    model_type = "side_by_side"


class Layer(Qwen3DecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(hidden_states=normed, **kwargs)[0] + self.mlp(normed)


class Model(Qwen3ForCausalLM):
    config_class = Config


AutoConfig.register("side_by_side", Config)
AutoModelForCausalLM.register(Config, Model)


class SideBySide(Transformers):
    name, title = "side_by_side", "Side by side"
    types = ("side_by_side",)
    objective = {"name": "block_diffusion", "block_size": 8}

    def adapt(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.__class__ = Layer
