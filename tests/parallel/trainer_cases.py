"""One Trainer run of the parity matrix, as every process makes it. The cases themselves need no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.diffusion_gemma_config import CONFIG as DIFFUSION_GEMMA

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ar": {"name": "ar"},
    "mdlm (llada)": {"name": "mdlm", "variant": "llada"},
    "mdlm (dream)": {"name": "mdlm", "variant": "dream"},
    "mdlm (mdlm)": {"name": "mdlm", "variant": "mdlm"},
    "block_diffusion (bd3lm)": {"name": "block_diffusion", "variant": "bd3lm", "block_size": 8},
    "block_diffusion (sdar)": {"name": "block_diffusion", "variant": "sdar", "block_size": 8},
    "block_diffusion (llada2)": {"name": "block_diffusion", "variant": "llada2", "block_size": 8},
    "block_diffusion (2 draws)": {"name": "block_diffusion", "block_size": 8, "draws": 2},
    "block_diffusion (causal clean)": {"name": "block_diffusion", "block_size": 4, "clean": "causal"},
    "fast_dllm_v2": {"name": "fast_dllm_v2", "block_size": 8},
}
#: Proven in test_hybrids.
HYBRIDS: dict[str, dict[str, Any]] = {
    "i_dlm": {"name": "i_dlm", "block_size": 8},
    "nemotron": {"name": "block_diffusion", "variant": "nemotron", "block_size": 8},
    "annealed": {"name": "fast_dllm_v2", "block_size": 8, "anneal": 0.5},
}
#: Losses that take more of a row than its cross-entropy, proven there too.
OWN_LOSSES: dict[str, dict[str, Any]] = {
    "confidence": {"name": "block_diffusion", "variant": "llada2", "block_size": 8, "confidence": 3.0},
    "clipped": {"name": "clipped", "block_size": 8},
}
#: Not of the table: its noise window follows from the evaluations.
CLIP_AUTO = {"name": "block_diffusion", "block_size": 8, "clip": "auto"}

MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}

#: Untied, with biases, and a vocabulary that neither two nor four ranks divide evenly.
MODELS["uneven"] = {
    "model_type": "llama",
    "vocab_size": 67,
    "num_key_value_heads": 4,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}

#: Objectives with a model of their own.
GEMMA = {
    "diffusion_gemma": {"name": "diffusion_gemma", "block_size": 8},
    "diffusion_gemma (2 draws)": {"name": "diffusion_gemma", "draws": 2, "encoder_targets": "supervised"},
    "diffusion_gemma (no first pass)": {"name": "diffusion_gemma", "self_conditioning": 0.0, "fill": "none"},
}
MODELS["gemma"] = DIFFUSION_GEMMA
MODELS["gemma pairs"] = {
    **DIFFUSION_GEMMA,
    "text_config": {**DIFFUSION_GEMMA["text_config"], "num_global_key_value_heads": 2},
}
WIDE = {"top_k_experts": 4, "initializer_range": 0.2}
MODELS["gemma dense"] = {
    **DIFFUSION_GEMMA,
    "initializer_range": 0.2,
    "text_config": {**DIFFUSION_GEMMA["text_config"], **WIDE},
}
#: Enough layers for ranks of two stages.
MODELS["five"] = {"num_hidden_layers": 5}
MODELS["uneven four"] = MODELS["uneven"] | {"num_hidden_layers": 4}
ROUTING = ("balance_loss", "z_loss", "router_entropy", "expert_load", "experts_unused")

#: Of a run; a few are long.
STEPS, LONG_STEPS = 6, 20
PACK = 32


@dataclass(frozen=True)
class Case:
    """pipeline x replicas x shards x blocks x tensor ranks; experts: ranks of the middle three that experts are divided
    over; zero None: the default; data: packed, long or prompt; options: further overrides, also for a process alone."""

    objective: str
    placement: str = "csbp"
    exchange: str = "auto"
    blocks: int = 2
    replicas: int = 1
    data: str = "packed"
    batch_size: int = 2
    micro_batch: int = 2
    checkpointing: str = "none"
    dtype: str = "float64"
    model: str = "full"
    options: tuple[str, ...] = ()
    shards: int = 1
    zero: int | None = None
    tensor: int = 1
    experts: int = 1
    prefetch: int = 0
    pipeline: int = 1
    schedule: str = "1f1b"
    stage_layers: tuple[int, ...] | None = None
    steps: int = STEPS

    @property
    def ranks(self) -> int:
        return self.blocks * self.shards * self.replicas * self.tensor * self.pipeline

    def alone(self) -> Case:
        """The same training on one process."""
        return replace(
            self,
            placement="auto",
            exchange="auto",
            blocks=1,
            replicas=1,
            shards=1,
            zero=None,
            tensor=1,
            experts=1,
            prefetch=0,
            pipeline=1,
            schedule="1f1b",
            stage_layers=None,
            micro_batch=self.micro_batch if "model.balance_loss" in str(self.options) else self.batch_size,
            checkpointing="none",
        )

    def overrides(self) -> list[str]:
        options = [f"parallel.{key}={value}" for key, value in self.parallel().items()]
        options += [f"training.micro_batch={self.micro_batch}", f"training.checkpointing={self.checkpointing}"]
        options += [
            f"training.steps={self.steps}",
            f"training.batch_size={self.batch_size}",
            f"data.pack_tokens={PACK}",
        ]
        return [*options, f"model.dtype={self.dtype}", *self.options]

    def parallel(self) -> dict[str, Any]:
        sizes = {"block_parallel_size": self.blocks, "data_parallel_size": self.replicas, "timeout": 60}
        node = {"node_size": 2} if "+" in self.exchange else {}
        sizes |= {"shard_size": self.shards, "prefetch": self.prefetch} | ({"zero": self.zero} if self.zero else {})
        sizes |= {"model_parallel_size": self.tensor} if self.tensor > 1 else {}
        if self.pipeline > 1:
            sizes |= {"pipeline_stages": self.pipeline, "schedule": self.schedule}
            sizes |= {"stage_layers": list(self.stage_layers)} if self.stage_layers else {}
        sizes |= {"expert_parallel_size": self.experts} if self.experts > 1 else {}
        if self.blocks == 1:
            return sizes
        return {**sizes, "placement": self.placement, "exchange": self.exchange, **node}


def documents(kind: str, below: int = 63) -> list[dict[str, Any]]:
    """Records of token ids. prompt: three tokens of four are a prompt, some documents are nothing else."""
    generator = np.random.default_rng(5)
    size = {"packed": (3, 40), "long": (PACK, PACK + 1), "prompt": (30, 60)}[kind]
    found = []
    for number in range(60):
        ids = generator.integers(0, below, generator.integers(*size)).tolist()
        prompt = 0 if kind != "prompt" else len(ids) if number % 5 == 0 else 3 * len(ids) // 4
        found.append({"input_ids": ids, "loss_mask": [int(i >= prompt) for i in range(len(ids))]})
    return found


def held(model: Any) -> int:
    """Bytes of the memory behind the parameters that this process has, of those in four bits nothing."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    held = [getattr(each, "_local_tensor", each) for each in model.parameters()]
    held = [each.untyped_storage() for each in held if not is_traceable_wrapper_subclass(each)]
    return sum({each.data_ptr(): each.nbytes() for each in held}.values())


def numbers(tensor: Any) -> np.ndarray:
    """As numpy has them, which has no bf16."""
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def train(case: Case, path: str, stop: int | None = None, below: int = 63) -> dict[str, Any]:
    """Run it in the folder `path` (to the step `stop`); every number of its log, and the weights it ends with."""
    import tests.objectives.clipped  # noqa: F401  its name is registered
    from tests.training.tiny import config, log, stop_at
    from unmask.models.adapters import nf4
    from unmask.runs.open import open_model
    from unmask.training.trainer import Trainer

    objective = {**OBJECTIVES, **GEMMA, **HYBRIDS, **OWN_LOSSES, "clip auto": CLIP_AUTO}[case.objective]
    settings = config(Path(path), *case.overrides(), objective=objective, model=MODELS[case.model])
    evaluated = settings.evaluation.every or None
    trainer = Trainer(config=settings, callbacks=[stop_at(stop)] if stop else [])
    summary = trainer.train(documents(case.data, below), documents("prompt")[:7] if evaluated else None)
    # Only the first process writes the log, and it may still be writing.
    records = log(Path(path)) if trainer.mesh.first else []
    bound = summary.validation
    weights = {}
    if trainer.mesh.first:
        # From the checkpoint, which all share: of a model that is divided over processes, each keeps its part only.
        model = open_model(summary.checkpoint).model
        nf4.dequantize(model)
        weights = {name: numbers(weight.detach()) for name, weight in model.named_parameters()}
    return {
        "step": summary.step,
        "in_parts": trainer.run.in_parts,
        "held": held(trainer.run.model),
        "last": [summary.loss, *([bound.nats_per_token, bound.standard_error] if bound else [])],
        "loss": [record["loss"] for record in records if record["kind"] == "step"],
        # Of objectives whose loss has it.
        "surprise": [r.get("surprise", 0.0) for r in records if r["kind"] == "step"],
        "norm": [record["grad_norm"] for record in records if record["kind"] == "step"],
        # Of experts alone, and of steps with labels.
        "routing": [[r.get(key, 0.0) for key in ROUTING] for r in records if r["kind"] == "step"],
        "bound": [(r["nats_per_token"], r["standard_error"]) for r in records if r["kind"] == "evaluation"],
        "weights": weights,
    }
