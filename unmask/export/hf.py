"""A transformers folder: safetensors, config.json, the tokeniser, and how the model was trained.

config.json gains `mask_token_id` and `unmask`: {"name", "options", "decoding"} of the objective, which is what
unmask's own sampler and evaluation read back.
"""

from __future__ import annotations

from pathlib import Path

from unmask.export.card import card
from unmask.models.adapters import lora
from unmask.models.families import ORIGIN
from unmask.models.families.bars import bars_in_terminals_only
from unmask.models.special import complete, savable
from unmask.objectives import name_of
from unmask.runs.open import OpenModel


def write(opened: OpenModel, folder: Path) -> None:
    """Save the model; AutoModelForCausalLM.from_pretrained(folder) gives the same logits."""
    model, decoding = opened.model, opened.objective.decoding
    lora.merge(model)
    if hasattr(model.config, ORIGIN):  # in this format it is transformers' own
        delattr(model.config, ORIGIN)
    name = name_of(opened.objective)
    if opened.mask_token_id is not None:
        model.config.mask_token_id = opened.mask_token_id
    model.config.unmask = {
        "name": name,
        "options": opened.objective.model_dump(mode="json"),
        "decoding": decoding._asdict(),
    }
    complete(model, opened.tokenizer)
    savable(model)
    with bars_in_terminals_only():
        model.save_pretrained(folder)
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card(opened, folder.name), encoding="utf-8")
