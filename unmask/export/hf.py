"""A transformers folder: safetensors, config.json, the tokeniser, and how the model was trained.

config.json gains `mask_token_id` and `unmask`: {"name", "options", "decoding"} of the objective, which is what
unmask's own sampler and evaluation read back.
"""

from __future__ import annotations

from pathlib import Path

from unmask.models import lora
from unmask.models.bars import bars_in_terminals_only
from unmask.models.checkpoints import OpenModel
from unmask.models.families import ORIGIN
from unmask.objectives import name_of

CARD = """\
# A diffusion language model trained with unmask

Objective `{name}`, decoding `{decoding}`, mask token id {mask}. It opens with transformers:

    model = AutoModelForCausalLM.from_pretrained("{folder}")

but it is not a causal model: give `model(...)` a 4-D attention mask in which every token sees {sees}
(a 2-D mask, or none, stays causal). To sample from it: `unmask sample {folder} --prompt "..."`.
"""

#: Of a model that transformers decodes by itself.
CANVAS_CARD = """\
# A diffusion language model trained with unmask

Objective `{name}`. It opens with transformers, which has a `generate` for it:

    model = AutoModelForMultimodalLM.from_pretrained("{folder}")

To sample from it here: `unmask sample {folder} --prompt "..."`.
"""

SEES = {
    "full": "the whole sequence",
    "block": "its own block of {size} tokens and all blocks before it",
    "canvas": "",
    "causal": "itself and the tokens before it",
}


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
    with bars_in_terminals_only():
        model.save_pretrained(folder)
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
    card = CARD if decoding.kind != "causal" else CARD.partition("but it is not")[0] + "\n"
    sees = SEES[decoding.kind].format(size=decoding.block_size)
    if decoding.kind == "canvas":
        card = CANVAS_CARD
    text = card.format(name=name, decoding=decoding.kind, mask=opened.mask_token_id, folder=folder.name, sees=sees)
    (folder / "README.md").write_text(text, encoding="utf-8")
