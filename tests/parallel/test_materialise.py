"""Ranks that read their own parts of a checkpoint train what one process trains that loads it whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.published import PUBLISHED, VOCABULARY
from tests.models.test_families import write
from tests.parallel.matrix import SMOOTH
from tests.parallel.test_diffusion_gemma import STEADY
from tests.parallel.test_parity import close, is_one
from tests.parallel.trainer_cases import LONG_STEPS, MODELS, Case, train

BASE = Case("block_diffusion (bd3lm)", "auto", blocks=1, batch_size=4, micro_batch=1)
SINGLE = {"dtype": "float32", "options": SMOOTH}
CANVASES = Case("diffusion_gemma", blocks=1, model="gemma", data="prompt", batch_size=4, micro_batch=1, options=STEADY)
#: Published models are trained here with another objective than their own.
CONVERT = "objective.convert=true"
#: (layout, mesh); a layout is a published one, or the model of the parity matrix that transformers saves.
CASES = {
    "llada, fsdp": ("LLaDA, biases, grouped, tied", replace(BASE, shards=2, zero=3)),
    "llada2, fsdp and experts": ("LLaDA2", replace(BASE, shards=2, experts=2, **SINGLE)),
    "llada2 merged, fsdp": ("LLaDA2, merged", replace(BASE, shards=2, zero=2, **SINGLE)),
    "untied with biases, tensor": ("uneven four", replace(BASE, tensor=2)),
    "untied with biases, fsdp and tensor": ("uneven four", replace(BASE, shards=2, tensor=2)),
    "tied, pipeline": ("five", replace(BASE, pipeline=2)),
    "tied, pipeline of a V and fsdp": ("five", replace(BASE, pipeline=2, shards=2, schedule="zbv", batch_size=6)),
    "experts, csbp and fsdp": ("experts", replace(BASE, blocks=2, zero=3, placement="csbp", **SINGLE)),
    "sliding, csbp and fsdp in half the dtype": ("sliding", replace(BASE, blocks=2, zero=3, placement="csbp")),
    "adapters, fsdp": ("full", replace(BASE, shards=2, options=("model.lora.rank=3",))),
    "a step of a run, fsdp": ("run", replace(BASE, shards=2)),
    "canvases, fsdp": ("gemma", replace(CANVASES, shards=2)),
}


def stored(layout, folder):
    """A checkpoint in several files; its first layer is not like the others'. Returns the mask token."""
    if layout in PUBLISHED:
        write(folder, PUBLISHED[layout](), 3)
        return VOCABULARY - 1
    from tests.training import tiny
    from tests.training.tiny import MODEL
    from unmask.config import ModelConfig
    from unmask.models import load

    if layout == "run":
        tiny.train(folder, "training.steps=1", model={"num_hidden_layers": 3})
        return 63
    if layout == "gemma":
        load(ModelConfig(config=MODELS[layout]), seed=3).model.save_pretrained(folder)
        return None
    model, _, _ = load(ModelConfig(config={**MODEL, **MODELS[layout]}, mask_token_id=63, fused=False), seed=3)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    model.to(torch.bfloat16 if layout == "sliding" else torch.float32).save_pretrained(folder, max_shard_size=size // 3)
    return 63


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 1, "experts": 2}])
def test_routers_that_are_kept_in_fp32_beside_bf16(options, workers, tmp_path):
    """LLaDA2's: FSDP2 divides what has one dtype. Few steps: rounding in bf16 soon chooses other experts."""
    mask = stored("LLaDA2", tmp_path / "stored")
    named = ("model.config=null", f"model.name={tmp_path / 'stored'}", f"model.mask_token_id={mask}", CONVERT)
    case = replace(BASE, shards=2, dtype="bfloat16", options=(*named, "optimizer.learning_rate=1e-3"), **options)
    case = replace(case, steps=LONG_STEPS)
    one = train(case.alone(), str(tmp_path / "one"), 3, mask)
    ranks = workers(2).run(train, case, str(tmp_path / "many"), 3, mask)
    close(ranks[0]["loss"], one["loss"], 2e-3)
    close(ranks[0]["norm"], one["norm"], 5e-3)
    start = PUBLISHED["LLaDA2"]().tensors
    for name in (name for name in start if name.endswith("gate.weight")):
        moved, wanted = (each["weights"][name] - start[name].numpy() for each in (ranks[0], one))
        assert np.linalg.norm(moved - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("of", CASES)
def test_parts_that_are_read_are_those_of_the_whole(of, workers, tmp_path):
    layout, case = CASES[of]
    mask = stored(layout, tmp_path / "stored")
    options = ("model.config=null", f"model.name={tmp_path / 'stored'}", *case.options)
    options += () if mask is None else (f"model.mask_token_id={mask}",)
    options += (CONVERT,) if layout in PUBLISHED else ()
    case = replace(case, options=options)
    one = train(case.alone(), str(tmp_path / "one"), None, mask or 63)
    ranks = workers(case.ranks).run(train, case, str(tmp_path / "many"), None, mask or 63)
    assert not one["in_parts"] and all(rank["in_parts"] for rank in ranks)
    assert all(rank["held"] < 0.75 * one["held"] for rank in ranks)
    is_one(ranks, one, case)
