"""DiffusionGemma's fine-tuning: all canvases of a response as rows of one pass, against one canvas at a time.

    python benchmarks/diffusion_gemma.py [--canvases 16] [--canvas 32] [--json]

All give the same loss and gradients (see tests/models/test_diffusion_gemma.py). One at a time is transformers' own
encoder and decoder, in two ways:

    by_canvas   as published fine-tuning scores a canvas: the encoder reads what is before it, the decoder the canvas,
                and backward runs; the encoder's loss is taken in the last pass over the document
    cached      the encoder reads the document once, canvas by canvas into one cache that keeps the graph, and each
                canvas's decoder reads the cache as it was before it; backward runs once. As many rows as jointly.

Rounds interleave.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import shown

from unmask.config import ModelConfig
from unmask.models import RowModel, load
from unmask.objectives import build
from unmask.rows import Document, Rows

TEXT: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1,
    "sliding_window": 128, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 128, "pad_token_id": None,
    "bos_token_id": 2, "eos_token_id": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
    "position_embedding_size": 8,
}  # fmt: skip


def by_canvas(twin: Any, document: Document, rows: Rows, *, cached: bool) -> float:
    """The loss of one document's rows, an encoder pass and a decoder pass (or two) for every canvas; its gradient is
    left on the twin. cached: encoder passes go on where the one before ended."""
    from transformers import DynamicCache

    cap, token = twin.config.text_config.final_logit_softcapping, torch.from_numpy(document.token)[None]
    labelled = np.flatnonzero(rows.label[: rows.clean] >= 0)
    weight = torch.from_numpy(rows.weight[labelled]).float()
    read, clean, parts, total = 0, [], [], 0.0

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(twin.lm_head(hidden) / cap)

    def encode(stop: int) -> None:
        given = {"cache": cache, "position_ids": torch.arange(read, stop)[None]}
        clean.append(twin.model.encoder(token[:, read:stop], **given).last_hidden_state)

    starts, sizes = rows.blocks()
    for number, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        if number == 0 or not cached:
            cache, read, clean = DynamicCache(config=twin.config.text_config), 0, []
        encode(int(rows.hi[first]))
        read, part = int(rows.hi[first]), slice(first, first + size)
        given: dict[str, Any] = {"decoder_input_ids": torch.from_numpy(rows.token[part])[None], "cache": cache}
        given["decoder_position_ids"] = torch.from_numpy(rows.position[part])[None]
        signal = None
        if rows.signal[first]:
            with torch.no_grad():
                signal = logits(twin.model.decoder(**given).last_hidden_state)
        hidden = twin.model.decoder(**given, self_conditioning_logits=signal).last_hidden_state
        label = torch.from_numpy(rows.label[part])
        parts.append(torch.nn.functional.cross_entropy(logits(hidden)[0], label, reduction="sum"))
        if number + 1 == len(starts):  # the encoder's loss: the last pass over the document goes on to its end
            encode(len(document))
            scores, label = logits(torch.cat(clean, 1))[0, labelled], torch.from_numpy(rows.label[labelled])
            parts.append((torch.nn.functional.cross_entropy(scores, label, reduction="none") * weight).sum())
        if number + 1 == len(starts) or not cached:
            loss = torch.stack(parts).sum()
            loss.backward()
            total, parts = total + float(loss.detach()), []
    return total


def work(document: Document, rows: Rows, first_pass: bool) -> float:
    """Rows through the layers, one canvas at a time over jointly; forward and backward count three, forward one."""
    pruned, (starts, sizes) = rows.pruned(), rows.blocks()
    canvases = (4 if first_pass else 3) * int(sizes.sum())
    encoded = 3 * (int(rows.hi[starts[:-1]].sum()) + len(document))
    return (encoded + canvases) / (3 * pruned.clean + canvases)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--canvases", type=int, default=16)
    parser.add_argument("--canvas", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return shown(json.dumps(each) if given.json else sentence(each) for each in measured(given))


def sentence(each: dict[str, Any]) -> str:
    return (
        f"{each['pass']:17} {each['work']:.2f} times the rows; joint {each['joint']:.3f} s, one at a time "
        f"{each['by_canvas']:.3f} s: {each['speedup_by_canvas']:.2f}x, with one cache {each['cached']:.3f} s: "
        f"{each['speedup_cached']:.2f}x"
    )


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is printed of a joint step with one pass, and of one with self-conditioning."""
    from transformers import DiffusionGemmaForBlockDiffusion

    config = {"model_type": "diffusion_gemma", "text_config": TEXT, "vision_config": VISION, "image_token_id": 4095}
    model = load(ModelConfig(config=copy.deepcopy({**config, "canvas_length": given.canvas}))).model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        twin = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, attn_implementation="sdpa")
    length = given.prompt + given.canvases * given.canvas
    token = np.random.default_rng(0).integers(2, 4000, length)
    document = Document(token, np.arange(length) >= given.prompt)
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

        def single(cached: bool, rows: Rows = rows) -> float:
            twin.zero_grad()
            return by_canvas(twin, document, rows, cached=cached)

        steps = {"joint": joint, "by_canvas": partial(single, False), "cached": partial(single, True)}
        loss = joint()
        difference = max(abs(step() / loss - 1) for step in steps.values())
        taken = seconds(steps, given.rounds)
        yield {
            "pass": name, "canvases": given.canvases, "canvas": given.canvas, "prompt": given.prompt, **taken,
            "work": work(document, rows, probability > 0), "relative_loss_difference": difference,
            **{f"speedup_{key}": taken[key] / taken["joint"] for key in ("by_canvas", "cached")},
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
