"""`sample`: continue a prompt, or fill a hole between a prompt and a suffix.

A sampler is a function `(network, canvas, options, report)` that fills `canvas` in place. The built-in ones are named
after the decoding kind they serve: `block` (a block at a time against a KV cache), `full` (the whole sequence at
every step) and `causal` (a token at a time).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.encoding import Encoder
from unmask.errors import UserError
from unmask.objectives import Decoding, rebuild
from unmask.registry import Registry
from unmask.sampling.canvas import Canvas, continuation, infill
from unmask.sampling.network import Network
from unmask.sampling.options import Options

samplers = Registry(
    "sampler",
    {
        "block": "unmask.sampling.drivers:block",
        "full": "unmask.sampling.drivers:full",
        "causal": "unmask.sampling.drivers:causal",
    },
)


@dataclass(frozen=True)
class Sample:
    """token: the new tokens, without EOS; text: their text ("" without a tokeniser); passes: forward passes used."""

    token: list[int]
    text: str
    passes: int
    interrupted: bool
    canvas: Canvas


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: str | Sequence[int],
    *,
    suffix: str | Sequence[int] | None = None,
    decoding: Decoding | None = None,
    report: Callable[[Canvas], None] | None = None,
    **options: Any,
) -> Sample:
    """Continue `prompt` by `length` tokens or up to EOS; with a `suffix`, fill a hole of `length` tokens before it.

    prompt, suffix: text, or token ids. decoding: how the model was trained (`objective.decoding`); a folder exported
    by unmask carries it. options: the fields of `Options`. report: called with the canvas after every step, for a
    live view. Ctrl-C ends the sampling; what was committed so far is returned, `interrupted` set.

    Right context: a `full` model sees the whole suffix. A `block` model sees the suffix tokens that share the block
    being filled and no others; the block grid is moved (by dropping a few leading prompt tokens) so that these are
    many. A hole longer than a block is filled block by block. A `causal` model refuses a suffix. EOS is never put
    into a hole, and the mask token never anywhere.
    """
    chosen = Options.parse(options, "sample")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"sample: the model is one of transformers, such as load(folder).model, not {_kind(model)}")
    if decoding is not None and not isinstance(decoding, Decoding):
        raise UserError(f"sample: decoding is the objective's, load(folder).objective.decoding, not {_kind(decoding)}")
    decoding = decoding or _recorded(model)
    method = chosen.method or decoding.kind
    sampler = samplers[method]
    chosen.refuse_unused(method)
    mask = getattr(model.config, "mask_token_id", None)
    if mask is None and decoding.kind != "causal":
        raise UserError("sample: the model's config has no mask_token_id; set it, or load the model with unmask")
    eos = tokenizer.eos_token_id if tokenizer is not None else None
    grid = 1 if method in ("full", "causal") else chosen.block_size or decoding.block_size or 1
    # A causal model needs no mask token; any id stands in for it, since open positions are never fed to it.
    filler = mask if mask is not None else 0
    ends = [_ids(tokenizer, text) for text in (prompt, suffix if suffix is not None else [])]
    rows = model.get_input_embeddings().weight.shape[0]
    for given in [*ends[0], *ends[1]]:
        if not 0 <= given < rows or given == mask:
            what = "the mask token" if given == mask else f"outside the model's {rows} embeddings"
            raise UserError(f"sample: the prompt or suffix holds token id {given}, which is {what}")
    if suffix is None:
        canvas = continuation(ends[0], chosen.length, filler, eos=eos)
    else:
        canvas = infill(ends[0], chosen.length, ends[1], filler, block_size=grid)
    banned = _banned(model, tokenizer, mask, eos if suffix is not None else None)
    network = Network(model, decoding, banned)
    interrupted, training = False, model.training
    model.eval()
    try:
        sampler(network, canvas, chosen, report or (lambda canvas: None))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        model.train(training)
    token = canvas.answer()
    return Sample(token, tokenizer.decode(token) if tokenizer else "", network.passes, interrupted, canvas)


def _recorded(model: PreTrainedModel) -> Decoding:
    record = getattr(model.config, "unmask", None)
    if not record:
        raise UserError("sample: the model does not say how it was trained; pass decoding=objective.decoding")
    return rebuild(record["name"], record["options"]).decoding


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _ids(tokenizer: PreTrainedTokenizerBase | None, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        try:
            return [operator.index(token) for token in text]
        except TypeError:
            raise UserError(f"sample: a prompt or suffix is text or a list of token ids, not {text!r}") from None
    if not text:
        return []
    if tokenizer is None:
        raise UserError("sample: this model has no tokeniser, so that a prompt or suffix must be token ids")
    # As training data is read: a text that spells the mask token is plain characters.
    return Encoder(tokenizer, eos=False).encode([text])[0].tolist()


def _banned(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, mask: int | None, eos: int | None
) -> Tensor:
    """bool [vocabulary]: the mask token, EOS in a hole, and padded rows the tokeniser has no text for."""
    banned = torch.zeros(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
    if tokenizer is not None:
        banned[len(tokenizer) :] = True
    for token in (mask, eos):
        if token is not None:
            banned[token] = True
    return banned
