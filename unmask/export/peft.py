"""Adapters alone, in peft's format: adapter_model.safetensors, adapter_config.json, and how they were trained.

`PeftModel.from_pretrained(base, folder)` opens it onto the model that the run started from. unmask.json, which
peft does not read, has {"model", "objective", "mask_token_id", "base"}, for unmask's own sampler and evaluation.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.export.card import header
from unmask.models.adapters import lora
from unmask.models.families import origin_of
from unmask.objectives import name_of
from unmask.runs.open import ADAPTERS, OpenModel

CARD = """\
{header}# Adapters of {kind} language model trained with unmask

They go onto `{base}`:

    base = AutoModelForCausalLM.from_pretrained("{base}")
    base.resize_token_embeddings({rows}, mean_resizing=False)  # where it has fewer
    model = PeftModel.from_pretrained(base, "{folder}")

To sample: `unmask sample {folder} --prompt "..."`. The whole model: `unmask export {folder} OUT --format hf`.
"""


#: Of a base that transformers does not open.
FOREIGN_CARD = """\
{header}# Adapters of {kind} language model trained with unmask

They go onto `{base}`, under the names that transformers' module has for its weights. To open them with peft, write the
base in that layout first:

    unmask export {base} BASE --format hf
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "{folder}")

To sample: `unmask sample {folder} --prompt "..."`. The whole model: `unmask export {folder} OUT --format family`.
"""


def write(opened: OpenModel, folder: Path) -> None:
    """Save the adapters; UserError for a model without, or one whose base is no folder."""
    from safetensors.torch import save_file

    model, settings = opened.model, opened.settings
    if settings is None or not settings.lora.rank:
        raise UserError("format=peft writes adapters, and this model was trained without (model.lora.rank): use hf")
    if settings.name is None:
        raise UserError("format=peft: the adapters' base is no folder (model.config, random weights): use format=hf")
    tensors = lora.state(model, settings.lora)
    whole = {name.split(".")[-2] for name in tensors if ".lora_" not in name and ".token_adapter." not in name}
    config = deepcopy(model.peft_config[lora.ADAPTER])
    config.base_model_name_or_path = str(Path(settings.name).absolute())
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    config.modules_to_save = sorted(whole) or None
    if config.target_parameters:  # peft refuses dropout there, which only training has
        config.lora_dropout = 0.0
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    recorded: dict[str, Any] = {
        "model": settings.model_dump(mode="json") | {"name": config.base_model_name_or_path},
        "objective": {"name": name_of(opened.objective), "options": opened.objective.model_dump(mode="json")},
        "mask_token_id": opened.mask_token_id,
        "base": lora.base_facts(model),
    }
    (folder / ADAPTERS).write_text(json.dumps(recorded, indent=1), encoding="utf-8")
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    decoded, name = opened.objective.decoding.kind, recorded["objective"]["name"]
    words = {"header": header(decoded, name, "peft", settings.name), "base": settings.name, "folder": folder.name}
    kind = "an autoregressive" if decoded == "causal" else "a diffusion"
    card = (FOREIGN_CARD if origin_of(model) else CARD).format(kind=kind, rows=rows, **words)
    (folder / "README.md").write_text(card, encoding="utf-8")
