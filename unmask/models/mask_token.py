"""The mask token of a model that may never have had one.

In order: the id that is asked for; the model's own; the tokeniser's own; else the first id after the tokeniser's, which
reuses a padded row of the embedding where there is one (Qwen) and grows the embedding by a row where there is none
(Llama). A grown row starts as the mean of all rows, in the embedding and, where it is not tied, in the head. A model
that was trained with a mask token gets no other: where it is not known which, it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unmask.errors import UserError
from unmask.hf import vocabulary_of
from unmask.models.families.materialise import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK = "<|mask|>"


def ensure_mask_token(
    model: PreTrainedModel, tokenizer: Any, requested: int | None = None, *, trained: str = "", where: str = ""
) -> int:
    """Give `model` (and `tokenizer`, where it has no mask token) a mask token; returns its id.

    trained: what a model is called that was trained with one; where: of the model, for errors.
    """
    start = f"{where}: " if where else ""
    rows = model.get_input_embeddings().weight.shape[0]
    known = requested
    if known is None:
        known = getattr(model.config, "mask_token_id", None)
    if known is None and tokenizer is not None:
        known = tokenizer.mask_token_id
    if known is not None and not 0 <= known <= rows - bool(trained):
        again = "; give the id that it was trained with" if trained else ""
        raise UserError(
            f"{start}mask token id {known} does not fit the model's {rows} embeddings (model.mask_token_id){again}"
        )
    if known is None and trained:
        raise UserError(
            f"{start}{trained} was trained with a mask token, and neither config.json nor the tokeniser says which of "
            f"its {rows} embeddings that is: give its id (model.mask_token_id of a training, mask_token_id=ID of "
            f"sample, --mask-token-id ID of eval and export)"
        )
    _check_free(requested, model, tokenizer)
    mask = known if known is not None else _next_id(tokenizer, rows)
    if mask >= rows:
        _grow(model, mask + 1)
    if tokenizer is not None and tokenizer.mask_token_id is None:
        _name_it(tokenizer, mask)
    model.config.mask_token_id = mask
    return mask


def _check_free(requested: int | None, model: PreTrainedModel, tokenizer: Any) -> None:
    """UserError for a mask token that begins or ends texts: data hold it, and only noise may."""
    for kind in ("bos", "eos"):
        own = [getattr(each, f"{kind}_token_id", None) for each in (model.config.get_text_config(), tokenizer)]
        if requested is not None and requested in [
            each for ids in own for each in (ids if isinstance(ids, list) else [ids])
        ]:
            raise UserError(
                f"mask token id {requested} is the model's {kind.upper()} token, which data hold: give another one"
            )


def _next_id(tokenizer: Any, rows: int) -> int:
    """The first id after the tokeniser's or, of one that is larger than the model, after the model's; none in use."""
    if tokenizer is None:
        return rows
    free = min(vocabulary_of(tokenizer), rows)
    while free in tokenizer.all_special_ids:
        free += 1
    return free


def _name_it(tokenizer: Any, mask: int) -> None:
    """Let the tokeniser know the mask token: by the name it has, or a new one where the next new id is the right one.

    One that is known by another id keeps no name for it: its texts never hold that id.
    """
    if mask in tokenizer.get_vocab().values():
        tokenizer.mask_token = tokenizer.convert_ids_to_tokens(mask)
    elif mask == _given_next(tokenizer):
        tokenizer.add_special_tokens({"mask_token": MASK})


def _given_next(tokenizer: Any) -> int:
    """The id that the tokeniser would give to a token that is added: not always one that is free."""
    if not tokenizer.is_fast:
        return len(tokenizer)
    size = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    return max([size, *(1 + index for index in tokenizer.added_tokens_decoder if index >= size)])


@torch.no_grad()
def _grow(model: PreTrainedModel, rows: int) -> None:
    fill(model, "cpu", [model.get_input_embeddings(), model.get_output_embeddings()])
    before = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    for weight in {model.get_input_embeddings().weight, head.weight if head is not None else None} - {None}:
        weight[before:] = weight[:before].mean(0)
