"""The sections of a config besides `parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from unmask.config.section import Section
from unmask.errors import UserError


class AdapterConfig(Section):
    """Low-rank adapters (see `unmask.models.lora`)."""

    #: Rank of the adapters that are trained in place of the model's weights; 0: none, the whole model is trained.
    rank: int = Field(default=0, ge=0)
    #: Adapters are scaled by alpha / rank; empty: alpha is the rank.
    alpha: float | None = Field(default=None, gt=0)
    #: Dropout of the adapters' input, on one process.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    #: Linear modules that get an adapter, such as [q_proj, v_proj]; `auto`: all in the decoder's layers.
    targets: list[str] | Literal["auto"] = "auto"
    #: Train the magnitude of every output apart (DoRA).
    dora: bool = False
    #: Scale by alpha / sqrt(rank).
    rslora: bool = False
    #: Keep the weights that have adapters in four bits: none or nf4 (QLoRA; the extra `quant`).
    quantize: Literal["none", "nf4"] = "none"
    #: What else is trained: whole embeddings (a tied head with them), the mask token's row alone, norms.
    train: list[Literal["embeddings", "mask_token", "norms"]] = []

    @field_validator("train")
    @classmethod
    def _once(cls, train: list[str]) -> list[str]:
        if {"embeddings", "mask_token"} <= set(train):
            raise ValueError("embeddings hold the mask token's row: leave mask_token out")
        return train


class ModelConfig(Section):
    #: Folder with config.json and safetensors, or a `.gguf` file. Leave empty to start from `config`.
    name: str | None = None
    #: A transformers configuration (`model_type: qwen3`, `hidden_size: ...`): random initialisation from the seed.
    config: dict[str, Any] | None = None
    #: Dtype of the parameters (in training with fp32 copies of half precision); for arithmetic see training.precision.
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    #: Id of the mask token. Empty: the model's or tokeniser's own, else (not of a diffusion model) a padded or new row.
    mask_token_id: int | None = None
    #: Noise added to a mask embedding that is close to zero, over the first steps (converted AR models).
    mask_noise_steps: int = Field(default=0, ge=0)
    #: Compute the last layer's queries, output projection and MLP for labelled rows only; `auto`: where proven.
    skip_last_layer: bool | Literal["auto"] = "auto"
    #: Fused RMSNorm and SwiGLU (each verified against the module it replaces).
    fused: bool = True
    #: Attention backend: `auto` is tiles.
    attention: Literal["auto", "reference", "tiles", "flex"] = "auto"
    #: torch.compile every decoder layer.
    compile: bool = False
    #: Train low-rank adapters in place of the weights.
    lora: AdapterConfig = AdapterConfig()
    #: Coefficient of the load-balance loss of a mixture's routers; what config.json says of it has no effect.
    balance_loss: float = Field(default=0.0, ge=0)
    #: Coefficient of the z-loss of a mixture's routers.
    z_loss: float = Field(default=0.0, ge=0)


class SourceConfig(Section):
    #: What data.train takes.
    path: str
    #: Relative number of its tokens among what is trained on; empty (for all sources): as many as it has.
    weight: float | None = Field(default=None, gt=0)


class DataConfig(Section):
    #: A prepared dataset, or a source that `unmask prepare` reads; or a list of {path, weight}, which are mixed.
    train: str | list[SourceConfig] | None = None
    #: Held-out data in the same forms, for the likelihood bound, or {name: data} of several; empty: no evaluation.
    validation: str | dict[str, str] | None = None
    #: Folder or file of the tokeniser; empty: the prepared dataset's, else the model's.
    tokenizer: str | None = None
    #: Begin documents of text, and prompts, with the tokeniser's beginning token; `auto`: where it does so itself.
    bos: bool | Literal["auto"] = "auto"
    #: As of `unmask prepare`, for sources that are not prepared: their own names of fields, {text: content}.
    fields: dict[str, str] = {}
    #: Likewise: which turns of the assistant are learnt from.
    supervise: Literal["all", "last"] = "all"
    #: Likewise: a file with a chat template, in place of the tokeniser's; the run's tokeniser keeps it.
    chat_template: str | None = None
    #: Tokens in a pack.
    pack_tokens: int = Field(default=4096, ge=2)
    #: Documents longer than a pack are cut into chunks of its size; or refused; or left out of training, and counted.
    long_documents: Literal["cut", "refuse", "drop"] = "cut"

    @field_validator("train", mode="before")
    @classmethod
    def _sources(cls, train: Any) -> Any:
        """A path in a list stands for {path: ...}. Checked here, or a mistake would be told as one of a union."""
        if train is None or isinstance(train, str):
            return train
        if not isinstance(train, list):
            raise ValueError(f"it takes a path, or a list of paths or of {{path, weight}}, not {train!r}")
        if not train:
            raise ValueError("the list of sources is empty")
        items = [{"path": item} if isinstance(item, str) else item for item in train]
        try:
            return [SourceConfig.parse(item, f"item {number}") for number, item in enumerate(items)]
        except UserError as error:
            raise ValueError(str(error)) from None


class ObjectiveConfig(Section):
    model_config = ConfigDict(extra="allow")
    #: ar, mdlm, block_diffusion, fast_dllm_v2, i_dlm, diffusion_gemma, or one that another package registered. Empty:
    #: the one that the model was trained by, where its folder says so, else block_diffusion.
    name: str | None = None
    #: Train a diffusion model by another objective, block size or shift than its own.
    convert: bool = False

    @property
    def chosen(self) -> str:
        """The name, where the model has none of its own."""
        return self.name or "block_diffusion"

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    #: adamw, muon (hidden matrices; AdamW for the rest), or one that another package registered.
    name: str = "adamw"
    #: Its peak: `schedule` multiplies it.
    learning_rate: float = Field(default=3e-4, gt=0)
    #: muon: the peak for hidden matrices; empty: learning_rate.
    muon_learning_rate: float | None = Field(default=None, gt=0)
    #: muon: decay of the running mean of the gradient.
    momentum: Beta = 0.95
    #: muon: look one step ahead of the running mean.
    nesterov: bool = True
    #: muon: Newton-Schulz iterations.
    ns_steps: int = Field(default=5, ge=1, lt=100)
    #: muon: scale of an update, 0.2 * sqrt(max(rows, columns)) as AdamW's (Moonlight) or Jordan's sqrt(rows / columns).
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    #: Decay of the first and second moments, running means of the gradient and of its square.
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    #: Added to the root of the second mean.
    eps: float = Field(default=1e-8, gt=0)
    #: adamw: how the moments are kept: `full` (fp32, of fp64 parameters fp64), bf16, 8bit or 4bit.
    state: Literal["full", "bf16", "8bit", "4bit"] = "full"
    #: Applied to matrices only; norms, biases and embeddings (the mask token's row among them) are not decayed.
    weight_decay: float = Field(default=0.1, ge=0)


class ScheduleConfig(Section):
    #: What follows the warm-up: cosine or linear (to `floor`), constant, wsd, or one that another package registered.
    name: str = "cosine"
    #: Steps of linear warm-up, at most those of the run; below 1, a fraction of all steps.
    warmup: float = Field(default=0.05, ge=0)
    #: The learning rate at the end, as a fraction of its peak.
    floor: float = Field(default=0.1, ge=0, le=1)
    #: wsd: steps of the decay to `floor` at the end; below 1, a fraction of all steps.
    decay: float = Field(default=0.2, gt=0)
    #: wsd: how it falls over the decay, 1 - x, 1 - sqrt(x) or a half cosine.
    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"


def in_steps(length: float, steps: int) -> int:
    """A length of a schedule in steps; below 1 it is a fraction of all `steps`."""
    return round(length if length >= 1 else length * steps)


class SpikeConfig(Section):
    """Going back to the last checkpoint when the loss jumps (see `unmask.training.spikes`)."""

    #: A loss above `factor` times the median of the last `window` losses is a spike; 0: never.
    factor: float = Field(default=0.0, ge=0)
    #: Steps that the median is taken over; before there are so many, nothing is a spike.
    window: int = Field(default=50, ge=2)
    #: How often a run may go back; the next spike ends it.
    rollbacks: int = Field(default=3, ge=1)


class TrainingConfig(Section):
    #: Optimiser steps in all. Empty: `epochs` decides.
    steps: int | None = Field(default=None, ge=1)
    #: Passes over the training data, in place of `steps`; a fraction is allowed.
    epochs: float = Field(default=1.0, gt=0)
    #: Packs per optimiser step, over all ranks and accumulation.
    batch_size: int = Field(default=1, ge=1)
    #: Packs that go through the model together; batch_size / micro_batch is the accumulation.
    micro_batch: int = Field(default=1, ge=1)
    #: Largest gradient norm; 0 turns clipping off.
    clip: float = Field(default=1.0, ge=0)
    #: Decay of an average of the weights, kept in fp32 at least (0: none): sample, eval and export take it with --ema.
    ema: Beta = 0.0
    #: Arithmetic of the forward pass: autocast to bf16 or fp16 (with loss scaling), or none.
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: Activation checkpointing: `full` recomputes layers, `selective` keeps attention's result, `mlp` only their MLPs.
    checkpointing: Literal["none", "full", "selective", "mlp"] = "none"
    #: What `full` or `selective` keeps waits in the CPU's memory until the backward pass (on a GPU).
    offload_activations: bool = False
    #: Of random weights, the order of the data and the noise.
    seed: int = Field(default=0, ge=0, lt=2**63)
    #: Only torch algorithms that give the same bits every time; an operation without one is an error.
    deterministic: bool = False
    #: A loss that jumps: back to the last checkpoint, and past the data since.
    spike: SpikeConfig = SpikeConfig()
    #: cpu, cuda or cuda:N; `auto` is the GPU where there is one.
    device: str = "auto"
    #: CPU threads; empty: torch's choice.
    threads: int | None = Field(default=None, ge=1, le=1024)


class CheckpointConfig(Section):
    #: Folder of the run: checkpoints, log and the resolved config.
    path: str = Field(default="runs/unmask", min_length=1)
    #: Steps between checkpoints; 0 saves only at the end and on a signal.
    every: int = Field(default=0, ge=0)
    #: How many to keep; 0 keeps all.
    keep: int = Field(default=2, ge=0)
    #: Save at every evaluation that gives the lowest bound so far, and keep that checkpoint; `best` points to it.
    best: bool = False
    #: Write in the background, from a copy in memory, while training goes on.
    asynchronous: bool = False
    #: Continue from the newest checkpoint in `path` when there is one.
    resume: bool = True
    #: Continue from the checkpoint of this step instead; later ones are set aside at the next save.
    step: int | None = Field(default=None, ge=0)


class EvaluationConfig(Section):
    #: Steps between evaluations of the likelihood bound; 0: only at the end.
    every: int = Field(default=0, ge=0)
    #: Packs evaluated; 0 takes the whole validation set.
    packs: int = Field(default=16, ge=0)
    #: Noise draws per chunk (a document, or a part of pack_tokens of a longer one).
    draws: int = Field(default=1, ge=1)
    #: Evaluate the EMA weights where training.ema keeps them.
    ema: bool = True
    #: Also the exact next-token likelihood, as an autoregressive model: a check on what a conversion keeps.
    ar: bool = False


class ProfileConfig(Section):
    """Steps that torch's profiler watches; a Chrome trace of each rank goes to `profile/` in the run's folder."""

    #: Steps before the first that is watched.
    start: int = Field(default=5, ge=0)
    #: How many are watched; 0: none.
    steps: int = Field(default=0, ge=0)
    #: Also who holds the memory: on a GPU a snapshot for pytorch.org/memory_viz, on a CPU a table by operation.
    memory: bool = False


class LogConfig(Section):
    #: Steps between lines of the JSONL log and of the console.
    every: int = Field(default=1, ge=1)
    #: `rich`: a live progress line; `plain`: a line each; `auto`: rich in a terminal, else plain.
    console: Literal["auto", "rich", "plain", "none"] = "auto"
    #: Trackers besides the JSONL log and the console: tensorboard, trackio, wandb, mlflow, or one of another package.
    trackers: list[str] = []
    #: Options of the trackers by name, such as `{wandb: {project: llada}}`; each tracker's are in docs/tracking.md.
    options: dict[str, dict[str, Any]] = {}
    #: The gradient noise scale, in packs; `auto`: where a step has two micro-batches and a pack one rank.
    noise_scale: bool | Literal["auto"] = "auto"
    #: Bins of the noise level for which the loss is logged apart; 0: none.
    levels: int = Field(default=5, ge=0, le=100)
    #: torch's profiler, for some steps.
    profile: ProfileConfig = ProfileConfig()
