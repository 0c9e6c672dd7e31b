"""The layout that a model came in (`unmask.models.families`): its names, its config.json, its tokeniser.

config.json gains `unmask`, the objective of a model that was trained here; the rest is what it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unmask.export.card import header, title
from unmask.models.adapters import lora
from unmask.models.families import write_folder
from unmask.models.families.trained import objective_of
from unmask.objectives import described, name_of
from unmask.runs.open import OpenModel

CARD = """\
{header}# {title} trained with unmask

Objective `{name}`, in the layout of `{kind}`: programs that know that family open it, transformers itself does not.

To sample from it: `unmask sample {folder} --prompt "..."`. In transformers' own layout, with a sampler that needs
nothing else: `unmask export {folder} OUT --format hf`.
"""


def write(opened: OpenModel, folder: Path) -> None:
    """Save the model; UserError for one that did not come from another family's folder."""
    lora.merge(opened.model)
    raw = write_folder(opened.model, folder)
    raw.pop("unmask", None)
    known = objective_of(raw)
    recorded: dict[str, Any] = {"name": name_of(opened.objective), "options": opened.objective.model_dump(mode="json")}
    if known is None or known.bind(opened.model, opened.tokenizer, opened.mask_token_id) != opened.objective:
        raw["unmask"] = recorded | {"decoding": opened.objective.decoding._asdict()}
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
    kind, name = opened.objective.decoding.kind, recorded["name"]
    start = header(kind, name, "transformers", opened.source)
    words = {"title": title(kind), "name": described(opened.objective), "kind": raw.get("model_type")}
    text = CARD.format(header=start, folder=folder.name, **words)
    (folder / "README.md").write_text(text, encoding="utf-8")
