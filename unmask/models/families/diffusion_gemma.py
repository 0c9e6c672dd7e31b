"""DiffusionGemma: transformers' own, an encoder and a decoder with the same weights, run here as one decoder over rows.

How that is computed is in `unmask.models.families.canvases`, which needs transformers' modelling code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from unmask.errors import UserError
from unmask.models.families.transformers import Transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DiffusionGemma(Transformers):
    """Canvases of random tokens become text; there is no mask token, and images are not trained on."""

    name, title = "diffusion_gemma", "DiffusionGemma"
    types = ("diffusion_gemma",)
    masked = False
    objective = {"name": "diffusion_gemma"}
    sized_by = "canvas_length"

    def auto(self) -> Any:
        from transformers import AutoModelForMultimodalLM

        return AutoModelForMultimodalLM

    def sized(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields.setdefault("text_config", {})

    def adapt(self, model: PreTrainedModel) -> None:
        from unmask.models.families import canvases

        canvases.over_rows(model)

    def check_text(self, model: PreTrainedModel, token: np.ndarray) -> None:
        image = model.config.image_token_id
        if image is not None and (token == image).any():
            raise UserError(
                f"a document holds the token id {image} (image_token_id): DiffusionGemma is trained on text only here"
            )
