"""A tiny DiffusionGemma, its data, and transformers' own encoder and decoder run canvas by canvas."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.models.diffusion_gemma_config import CONFIG
from unmask.config import ModelConfig
from unmask.models import load
from unmask.models.families.canvases import DiffusionGemmaTextRouter, _Router
from unmask.objectives import Objective, build
from unmask.rows import Document, Rows


def tiny(dtype: str = "float64") -> Any:
    """A loaded model with large random weights, so that every connection matters."""
    model = load(ModelConfig(config=CONFIG, dtype=dtype)).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.02 if "embed_tokens" in name else 0.3 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.5 + float(torch.rand((), generator=generator)))
    return model


def stock(folder: Any, dtype: str = "float64") -> Any:
    """What transformers makes of an exported folder."""
    from transformers import DiffusionGemmaForBlockDiffusion

    twin = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    twin.set_experts_implementation("eager")
    for module in twin.modules() if dtype == "float64" else ():
        if isinstance(module, DiffusionGemmaTextRouter):
            module.__class__ = _Router
        elif type(module).__name__ == "DiffusionGemmaRMSNorm":  # transformers' norms and routers round to fp32
            module.forward = partial(_norm, module)
    return twin.eval()


def _norm(module: Any, x: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps)
    return normed * module.weight if module.with_scale else normed


def documents(lengths: tuple[tuple[int, int], ...] = ((23, 9), (14, 3), (9, 5))) -> list[Document]:
    """(tokens, those of the prompt) of each."""
    generator = np.random.default_rng(0)
    return [
        Document(generator.integers(2, 60, tokens), np.arange(tokens) >= prompt, number)
        for number, (tokens, prompt) in enumerate(lengths)
    ]


def objective(model: Any, **options: Any) -> Objective:
    return build("diffusion_gemma", options).bind(model, None, None)


def logits_of(twin: Any, hidden: Tensor) -> Tensor:
    cap = twin.config.text_config.final_logit_softcapping
    return cap * torch.tanh(twin.lm_head(hidden) / cap)


def by_canvas(twin: Any, docs: list[Document], rows: Rows) -> tuple[Tensor, list[Tensor]]:
    """(sum of weight * nll, logits of every row in row order) of `rows`, the rows of `docs`: an encoder pass over each
    document, and for every canvas one over what is before it and a decoder pass or two against its cache."""
    from transformers import DynamicCache

    clean, noisy, total = [], [], torch.zeros((), dtype=twin.dtype)

    def encoded(token: np.ndarray) -> tuple[Any, Tensor]:
        cache = DynamicCache(config=twin.config.text_config)
        out = twin.model.encoder(input_ids=torch.from_numpy(token)[None], cache=cache)
        return cache, out.last_hidden_state

    for document in docs:
        clean.append(logits_of(twin, encoded(document.token)[1])[0])
    starts, sizes = rows.blocks()
    offset = np.cumsum([0, *map(len, docs)])
    for first, size in zip(starts, sizes, strict=True):
        part = slice(first, first + size)
        number = rows.document[first]
        cache, _ = encoded(docs[number].token[: rows.hi[first] - offset[number]])
        given = {"decoder_input_ids": torch.from_numpy(rows.token[part])[None], "cache": cache}
        given["decoder_position_ids"] = torch.from_numpy(rows.position[part])[None]
        signal = None
        if rows.signal[first]:
            with torch.no_grad():
                signal = logits_of(twin, twin.model.decoder(**given).last_hidden_state)
        hidden = twin.model.decoder(**given, self_conditioning_logits=signal).last_hidden_state
        noisy.append(logits_of(twin, hidden)[0])
    logits = torch.cat([*clean, *noisy])
    labelled = rows.labelled
    nll = cross_entropy(logits[labelled], torch.from_numpy(rows.label[labelled]), reduction="none")
    total = (nll * torch.from_numpy(rows.weight[labelled]).to(nll.dtype)).sum()
    return total, logits
