"""DiffusionGemma's fine-tuning: all canvases of a response as rows of one pass, against one canvas at a time.

    python benchmarks/diffusion_gemma.py [--canvases 16] [--canvas 32] [--json]

Both give the same loss and gradients (see tests/models/test_diffusion_gemma.py). One at a time is transformers' own
encoder and decoder with its cache done well: the encoder reads the document once, canvas by canvas into one cache that
keeps the graph, and each canvas's decoder reads the cache as it was before it; backward runs once. Rounds interleave.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unmask.config import ModelConfig
from unmask.models import RowModel, load
from unmask.objectives import build
from unmask.rows import Document, Rows

TEXT: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1,
    "sliding_window": 128, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 128, "pad_token_id": None,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
    "position_embedding_size": 8,
}  # fmt: skip


def by_canvas(twin: Any, document: Document, rows: Rows) -> torch.Tensor:
    """The loss of one document's rows, an encoder pass and a decoder pass (or two) for every canvas."""
    from transformers import DynamicCache

    cap, total, token = twin.config.text_config.final_logit_softcapping, 0.0, torch.from_numpy(document.token)[None]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(twin.lm_head(hidden) / cap)

    cache, read, clean = DynamicCache(config=twin.config.text_config), 0, []
    starts, sizes = rows.blocks()
    for first, size in zip(starts, sizes, strict=True):
        upto = int(rows.hi[first])
        position = torch.arange(read, upto)[None]
        clean.append(twin.model.encoder(token[:, read:upto], cache=cache, position_ids=position).last_hidden_state)
        read, part = upto, slice(first, first + size)
        given: dict[str, Any] = {"decoder_input_ids": torch.from_numpy(rows.token[part])[None], "cache": cache}
        given["decoder_position_ids"] = torch.from_numpy(rows.position[part])[None]
        signal = None
        if rows.signal[first]:
            with torch.no_grad():
                signal = logits(twin.model.decoder(**given).last_hidden_state)
        hidden = twin.model.decoder(**given, self_conditioning_logits=signal).last_hidden_state
        total = total + torch.nn.functional.cross_entropy(
            logits(hidden)[0], torch.from_numpy(rows.label[part]), reduction="sum"
        )
    rest = torch.arange(read, len(document))[None]
    clean.append(twin.model.encoder(token[:, read:], cache=cache, position_ids=rest).last_hidden_state)
    labelled = np.flatnonzero(rows.label[: rows.clean] >= 0)
    nll = torch.nn.functional.cross_entropy(
        logits(torch.cat(clean, 1))[0, labelled], torch.from_numpy(rows.label[labelled]), reduction="none"
    )
    return total + (nll * torch.from_numpy(rows.weight[labelled]).float()).sum()


def seconds(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median time of each, one after the other in every round, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--canvases", type=int, default=16)
    parser.add_argument("--canvas", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    from transformers import DiffusionGemmaForBlockDiffusion

    config = {"model_type": "diffusion_gemma", "text_config": TEXT, "vision_config": VISION, "image_token_id": 4095}
    model = load(ModelConfig(config=copy.deepcopy({**config, "canvas_length": given.canvas}))).model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        twin = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, attn_implementation="sdpa")
    length = given.prompt + given.canvases * given.canvas
    token = np.random.default_rng(0).integers(2, 4000, length)
    document = Document(token, np.arange(length) >= given.prompt)
    found: dict[str, Any] = {"canvases": given.canvases, "canvas": given.canvas, "prompt": given.prompt}
    for name, probability in (("one pass", 0.0), ("self-conditioned", 1.0)):
        objective = build("diffusion_gemma", {"self_conditioning": probability}).bind(model, None, None)
        rows = objective.rows([document], 0)
        row_model = RowModel(model)

        def joint(rows: Rows = rows, row_model: Any = row_model, objective: Any = objective) -> float:
            model.zero_grad()
            batch = row_model.collate(rows.pruned())
            loss = row_model(batch, objective).sum
            loss.backward()
            return float(loss.detach())

        def single(rows: Rows = rows) -> float:
            twin.zero_grad()
            loss = by_canvas(twin, document, rows)
            loss.backward()
            return float(loss.detach())

        difference = abs(joint() / single() - 1)
        taken = seconds({"joint": joint, "by_canvas": single}, given.rounds)
        found[name] = {**taken, "speedup": taken["by_canvas"] / taken["joint"], "relative_loss_difference": difference}
    if given.json:
        print(json.dumps(found))
        return
    for name in ("one pass", "self-conditioned"):
        each, taken = found[name], {key: f"{found[name][key]:.3f} s" for key in ("joint", "by_canvas")}
        print(f"{name:17} joint {taken['joint']}, canvas by canvas {taken['by_canvas']}: {each['speedup']:.2f}x")


if __name__ == "__main__":
    main()
