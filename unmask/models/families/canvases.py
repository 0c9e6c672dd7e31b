"""DiffusionGemma over rows: its encoder reads the clean rows and its decoder the canvases, in one pass.

    clean row     embedding                              encoder's layer_scalar    causal
    canvas row    self_conditioning(embedding, signal)   decoder's layer_scalar    its canvas, and clean before it

Encoder and decoder share every weight but `self_conditioning`, which only the decoder has; of each layer they have a
`layer_scalar` (a buffer) of their own, and the decoder reads the encoder's keys and values. So the decoder's layers run
over all rows, each row with its own scalar, and the encoder's copies of them, which are tied, are left out: names and
checkpoints stay those of transformers. The vision tower is kept for export; images are not trained on.

What is private to transformers' modelling code (the modules' classes and names, the layer that ends in `hidden *=
layer_scalar`, the tied names of the model) is used in this file alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaDecoderTextAttention,
    DiffusionGemmaDecoderTextLayer,
    DiffusionGemmaModel,
    DiffusionGemmaModelOutputWithPast,
    DiffusionGemmaTextRouter,
)

from unmask.errors import UserError
from unmask.kernels import soft_embedding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Across(Protocol):
    """A tensor axis, as the model needs it (`unmask.parallel.tensor.Across`)."""

    group: ProcessGroup

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of [1, N, width], with zeros after the last."""
        ...

    def held(self, whole: Tensor) -> Tensor:
        """Of whole [n, vocabulary], the columns of the tokens whose embeddings this rank holds."""
        ...

    def summed(self, summand: Tensor) -> Tensor:
        """The ranks' summands, added."""
        ...


class _Layer(DiffusionGemmaDecoderTextLayer):
    """A decoder layer whose scalar is the row's."""

    def forward(self, hidden_states: Tensor, *args: Any, scalar: Tensor | None = None, **kwargs: Any) -> Tensor:
        """hidden_states [1, N, width], scalar [1, N, 1]. The buffer is swapped here, not by the caller, so that a
        checkpointed layer computes the same when it is repeated."""
        if scalar is None:
            return super().forward(hidden_states, *args, **kwargs)
        own = self._buffers["layer_scalar"]
        self._buffers["layer_scalar"] = scalar
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._buffers["layer_scalar"] = own


class _Attention(DiffusionGemmaDecoderTextAttention):
    """Attention whose `cache` says what becomes of a layer's keys and values: see `unmask.models.passes`."""

    def append_to_cache(self, cache: Any, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, rows, head_dim] of the pass -> those that its queries attend."""
        return cache.attended(self.layer_idx, key_states, value_states)


class _Router(DiffusionGemmaTextRouter):
    """The router with a softmax in fp32 at least: transformers' own rounds to fp32 in a model of fp64 too."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [N, width] -> probabilities [N, experts], weights and experts of the top k, [N, k]."""
        scores = self.proj(self.norm(hidden_states) * self.scale * self.scalar_root_size)
        probability = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, index = probability.topk(self.config.top_k_experts, dim=-1)
        return probability, weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[index], index


class _Model(DiffusionGemmaModel):
    """Encoder and decoder as one decoder; `self_conditions` says so to the row model."""

    self_conditions = True
    #: Modules that take each row by itself, whole on every rank of a tensor axis: names, and what is below them.
    undivided = ("encoder", "decoder.self_conditioning", "decoder.layers.*.router", "decoder.layers.*.experts")
    #: The tensor axis that rows between embedding and last norm are divided over, if any.
    across: Across | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def signal(self, hidden: Tensor, head: Tensor, softcap: float | None) -> Tensor:
        """hidden [m, width] of a first pass -> [m, width], what the second pass learns of its predictions."""
        embedding, across = self.decoder.embed_tokens, self.across
        soft = soft_embedding(hidden, head, embedding.weight, softcap, None if across is None else across.group)
        soft = soft if across is None else across.summed(soft)
        return soft * embedding.embed_scale.to(soft.dtype)

    def signal_of(self, logits: Tensor | None, rows: int) -> Tensor:
        """The same, [rows, width], of the logits [rows, vocabulary] of a sampling step before; 0 without them."""
        embedding, across = self.decoder.embed_tokens, self.across
        if logits is None:
            return embedding.weight.new_zeros((rows, embedding.embedding_dim))
        weight = embedding.weight
        probability = logits.to(weight.dtype).softmax(-1, dtype=torch.float32).to(weight.dtype)
        soft = probability @ weight if across is None else across.summed(across.held(probability) @ weight)
        return soft * embedding.embed_scale.to(soft.dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        canvas: Tensor | None = None,
        signal: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> DiffusionGemmaModelOutputWithPast:
        """input_ids, position_ids [1, N]; canvas: int64 [m], the rows of canvases (none: all rows are clean); signal
        [1, m, width]: what a first pass gives their embeddings (none: zero); logits_to_keep: rows of the result; cache:
        see _Attention.

        kwargs: the plan; what transformers' own forward passes on besides is of no use here.
        """
        decoder, scalars = self.decoder, self.encoder.language_model.layers
        hidden = decoder.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        noisy = torch.zeros(position_ids.shape[1], dtype=torch.bool, device=hidden.device)
        if canvas is None:
            noisy = noisy[: hidden.shape[1]]  # as many as this rank of a tensor axis has
        elif self.across is not None:
            canvas, noisy, signal = self._own(canvas, noisy, signal)
        else:
            noisy = noisy.index_fill(0, canvas, True)
        if canvas is not None:
            rows = hidden.index_select(1, canvas)
            signal = torch.zeros_like(rows) if signal is None else signal.to(rows.dtype)
            hidden = hidden.index_copy(1, canvas, decoder.self_conditioning(rows, signal).to(hidden.dtype))
        kinds = decoder.config.get_text_config().layer_types
        positions = {kind: decoder.rotary_emb(hidden, position_ids, kind) for kind in dict.fromkeys(kinds)}
        for kind, layer, clean in zip(kinds, decoder.layers, scalars, strict=True):
            hidden = layer(
                hidden,
                position_embeddings=positions[kind],
                attention_mask=None,
                position_ids=position_ids,
                scalar=torch.where(noisy[:, None], layer.layer_scalar, clean.layer_scalar)[None],
                cache=cache,
                plan=kwargs.get("plan"),
            )
        hidden = decoder.norm(hidden)
        if logits_to_keep is not None:
            hidden = hidden.index_select(1, logits_to_keep)
        return DiffusionGemmaModelOutputWithPast(last_hidden_state=hidden)

    def _own(self, canvas: Tensor, noisy: Tensor, signal: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(canvas, noisy, signal) of the rows that this rank of the tensor axis has; noisy [N] says where canvases are.

        `canvas` then counts from the first of its rows.
        """
        assert self.across is not None
        flag = torch.zeros(len(noisy), device=noisy.device).index_fill(0, canvas, 1.0)
        own = self.across.part(flag[None, :, None])[0, :, 0] > 0
        index = own.nonzero()[:, 0]
        if signal is not None:
            whole = signal.new_zeros((1, len(noisy), signal.shape[2])).index_copy(1, canvas, signal)
            signal = self.across.part(whole).index_select(1, index)
        return index, own, signal


class _Scalars(nn.Module):
    """What is left of an encoder layer: its `layer_scalar`."""

    layer_scalar: Tensor

    def __init__(self, scalar: Tensor):
        super().__init__()
        self.register_buffer("layer_scalar", scalar)


def over_rows(model: PreTrainedModel) -> None:
    """Make a DiffusionGemma a decoder over rows, in place; nothing is done twice.

    Routers and the vision tower are frozen. UserError for a model whose encoder is not its decoder's twin.
    """
    if isinstance(model.model, _Model):
        return
    text = model.config.get_text_config()
    if not (model.config.tie_word_embeddings and text.tie_word_embeddings):
        raise UserError("model: a DiffusionGemma whose encoder shares no weights (tie_word_embeddings=false): not run")
    if text.use_bidirectional_attention == "all":
        raise UserError("model: a DiffusionGemma whose encoder looks ahead (use_bidirectional_attention=all): not run")
    base = model.model
    # The encoder's text model stays, an empty shell: through it transformers sets what its text config says.
    encoder = base.encoder.language_model
    encoder.layers = nn.ModuleList([_Scalars(layer.layer_scalar) for layer in encoder.layers])
    del encoder.embed_tokens, encoder.norm, encoder.rotary_emb
    base.__class__ = _Model
    base.all_tied_weights_keys = encoder.all_tied_weights_keys = {}
    model.all_tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    base.encoder.requires_grad_(False)
    for layer in base.decoder.layers:
        layer.__class__ = _Layer
        layer.self_attn.__class__ = _Attention
        layer.router.__class__ = _Router
        layer.router.requires_grad_(False)
