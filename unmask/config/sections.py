"""The sections of a config besides `parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from unmask.config.section import Section
from unmask.errors import UserError


class AdapterConfig(Section):
    """Low-rank adapters (see `unmask.models.adapters.lora`)."""

    #: Rank of the adapters that are trained instead of the model's weights; 0: no adapters, train the full model.
    rank: int = Field(default=0, ge=0)
    #: Adapters are scaled by alpha / rank; empty: alpha is the rank.
    alpha: float | None = Field(default=None, gt=0)
    #: Dropout on the input of the adapters, on one process only.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    #: Linear modules that get an adapter, such as [q_proj, v_proj]; `auto`: all in the decoder's layers.
    targets: list[str] | Literal["auto"] = "auto"
    #: Train the magnitude of every output separately (DoRA).
    dora: bool = False
    #: Scale by alpha / sqrt(rank).
    rslora: bool = False
    #: Store the weights that have adapters in 4 bits: none or nf4 (QLoRA; needs the extra `quant`).
    quantize: Literal["none", "nf4"] = "none"
    #: What else is trained: embeddings (with a tied head), the embedding of the mask token only, norms.
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
    #: Dtype of the parameters (in training with fp32 master weights); for arithmetic see training.precision.
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    #: Id of the mask token. Empty: the model's or tokeniser's, else (not of a diffusion model) a padding or new row.
    mask_token_id: int | None = None
    #: Noise added to a mask embedding that is close to zero, over the first steps (converted AR models).
    mask_noise_steps: int = Field(default=0, ge=0)
    #: Compute the last layer's queries, output projection and MLP for labelled rows only; `auto`: where verified.
    skip_last_layer: bool | Literal["auto"] = "auto"
    #: Fused RMSNorm and SwiGLU (each verified against the module it replaces).
    fused: bool = True
    #: Attention backend: `auto` is tiles.
    attention: Literal["auto", "reference", "tiles", "flex"] = "auto"
    #: torch.compile every decoder layer.
    compile: bool = False
    #: Train low-rank adapters instead of the weights.
    lora: AdapterConfig = AdapterConfig()
    #: Coefficient of the load-balancing loss of the routers of a mixture of experts; config.json's has no effect.
    balance_loss: float = Field(default=0.0, ge=0)
    #: Coefficient of the z-loss of the routers of a mixture of experts.
    z_loss: float = Field(default=0.0, ge=0)


class SourceConfig(Section):
    #: What data.train takes.
    path: str
    #: Relative number of tokens from this source; empty (for all sources): in proportion to their sizes.
    weight: float | None = Field(default=None, gt=0)


class DataConfig(Section):
    #: A prepared dataset, or a source that `unmask prepare` reads; or a mixture, a list of {path, weight}.
    train: str | list[SourceConfig] | None = None
    #: Held-out data in the same forms, for the likelihood bound; several sets as {name: data}; empty: no evaluation.
    validation: str | dict[str, str] | None = None
    #: Folder or file of the tokeniser; empty: the prepared dataset's, else the model's.
    tokenizer: str | None = None
    #: Begin text documents and prompts with the tokeniser's beginning token; `auto`: if the tokeniser adds it.
    bos: bool | Literal["auto"] = "auto"
    #: As in `unmask prepare`, for unprepared sources: their field names, {text: content}.
    fields: dict[str, str] = {}
    #: Likewise: which assistant messages are supervised.
    supervise: Literal["all", "last"] = "all"
    #: Likewise: a file with a chat template to use instead of the tokeniser's; saved with the run's tokeniser.
    chat_template: str | None = None
    #: Tokens in a pack.
    pack_tokens: int = Field(default=4096, ge=2)
    #: Documents longer than a pack: cut them into chunks of that size; refuse them (an error); or drop and count them.
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
    #: the objective with which the model was trained, if its folder records it, else block_diffusion.
    name: str | None = None
    #: Train a diffusion model with another objective, block size or shift than before.
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
    #: Peak learning rate; `schedule` multiplies it.
    learning_rate: float = Field(default=3e-4, gt=0)
    #: muon: peak learning rate of hidden matrices; empty: learning_rate.
    muon_learning_rate: float | None = Field(default=None, gt=0)
    #: muon: momentum.
    momentum: Beta = 0.95
    #: muon: Nesterov momentum.
    nesterov: bool = True
    #: muon: Newton-Schulz iterations.
    ns_steps: int = Field(default=5, ge=1, lt=100)
    #: muon: update scale: 0.2 * sqrt(max(rows, columns)), like AdamW's (Moonlight), or sqrt(rows / columns) (Jordan).
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    #: Decay rates of the first and second moments.
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    #: Added to the square root of the second moment.
    eps: float = Field(default=1e-8, gt=0)
    #: adamw: format of the moments: `full` (fp32; fp64 for fp64 parameters), bf16, 8bit or 4bit.
    state: Literal["full", "bf16", "8bit", "4bit"] = "full"
    #: Weight decay of matrices; norms, biases and embeddings (also the mask token's) are not decayed.
    weight_decay: float = Field(default=0.1, ge=0)


class ScheduleConfig(Section):
    #: Schedule after the warm-up: cosine or linear (to `floor`), constant, wsd, or one that another package registered.
    name: str = "cosine"
    #: Steps of linear warm-up; below 1, a fraction of all steps.
    warmup: float = Field(default=0.05, ge=0)
    #: Final learning rate as a fraction of the peak.
    floor: float = Field(default=0.1, ge=0, le=1)
    #: wsd: steps of the decay to `floor` at the end; below 1, a fraction of all steps.
    decay: float = Field(default=0.2, gt=0)
    #: wsd: shape of the decay: 1 - x, 1 - sqrt(x) or a half cosine.
    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"


def in_steps(length: float, steps: int) -> int:
    """A length of a schedule in steps; below 1 it is a fraction of all `steps`."""
    return round(length if length >= 1 else length * steps)


class SpikeConfig(Section):
    """Going back to the last checkpoint when the loss jumps (see `unmask.training.spikes`)."""

    #: A loss above `factor` times the median of the last `window` losses is a spike; 0: never.
    factor: float = Field(default=0.0, ge=0)
    #: Steps over which the median is taken; with fewer steps nothing is a spike.
    window: int = Field(default=50, ge=2)
    #: Number of rollbacks allowed; the next spike ends the run.
    rollbacks: int = Field(default=3, ge=1)


class TrainingConfig(Section):
    #: Total optimiser steps. Empty: `epochs` decides.
    steps: int | None = Field(default=None, ge=1)
    #: Epochs, instead of `steps`; fractions are allowed.
    epochs: float = Field(default=1.0, gt=0)
    #: Packs per optimiser step, over all ranks and gradient accumulation.
    batch_size: int = Field(default=1, ge=1)
    #: Packs that go through the model together; batch_size / micro_batch is the number of accumulated micro-batches.
    micro_batch: int = Field(default=1, ge=1)
    #: Gradient norm above which gradients are clipped; 0: no clipping.
    clip: float = Field(default=1.0, ge=0)
    #: Decay of the EMA weights (fp32 or wider), which sample, eval and export use with --ema; 0: none.
    ema: Beta = 0.0
    #: Arithmetic of the forward pass: autocast to bf16 or fp16 (with loss scaling), or none.
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: Activation checkpointing: `full` recomputes layers, `selective` all but attention, `mlp` only MLPs.
    checkpointing: Literal["none", "full", "selective", "mlp"] = "none"
    #: On a GPU: move what `full` or `selective` keeps to CPU memory until the backward pass.
    offload_activations: bool = False
    #: Seed of random weights, data order and noise.
    seed: int = Field(default=0, ge=0, lt=2**63)
    #: Use deterministic torch algorithms only; an operation without one is an error.
    deterministic: bool = False
    #: Loss spikes: roll back to the last checkpoint and skip the data since then.
    spike: SpikeConfig = SpikeConfig()
    #: cpu, cuda or cuda:N; `auto`: a GPU if there is one.
    device: str = "auto"
    #: CPU threads; empty: torch's default.
    threads: int | None = Field(default=None, ge=1, le=1024)


class CheckpointConfig(Section):
    #: Folder of the run: checkpoints, log and the resolved config.
    path: str = Field(default="runs/unmask", min_length=1)
    #: Steps between checkpoints; 0: only at the end and on a signal.
    every: int = Field(default=0, ge=0)
    #: Number of checkpoints to keep; 0: all.
    keep: int = Field(default=2, ge=0)
    #: Save at every evaluation with the lowest bound so far, and keep that checkpoint; `best` points to it.
    best: bool = False
    #: Write in the background, from a copy in memory, while training continues.
    asynchronous: bool = False
    #: Resume from the newest checkpoint in `path`, if there is one.
    resume: bool = True
    #: Resume from the checkpoint of this step instead; later ones are renamed at the next save.
    step: int | None = Field(default=None, ge=0)


class EvaluationConfig(Section):
    #: Steps between evaluations of the likelihood bound; 0: only at the end.
    every: int = Field(default=0, ge=0)
    #: Packs evaluated; 0: the complete validation set.
    packs: int = Field(default=16, ge=0)
    #: Noise draws per chunk (a document, or a part of a longer one).
    draws: int = Field(default=1, ge=1)
    #: Evaluate the EMA weights, if training.ema is on.
    ema: bool = True
    #: Also measure the exact next-token likelihood, as an autoregressive model: what a conversion has kept.
    ar: bool = False


class ProfileConfig(Section):
    """Steps that torch's profiler watches; a Chrome trace of each rank goes to `profile/` in the run's folder."""

    #: Steps before the first profiled step.
    start: int = Field(default=5, ge=0)
    #: Number of profiled steps; 0: none.
    steps: int = Field(default=0, ge=0)
    #: Also profile memory: on a GPU a snapshot for pytorch.org/memory_viz, on a CPU a table by operation.
    memory: bool = False


class LogConfig(Section):
    #: Steps between lines of the JSONL log and of the console.
    every: int = Field(default=1, ge=1)
    #: `rich`: a live progress line; `plain`: one line per step; `auto`: rich in a terminal, else plain.
    console: Literal["auto", "rich", "plain", "none"] = "auto"
    #: Trackers besides the JSONL log and the console: tensorboard, trackio, wandb, mlflow, or one of another package.
    trackers: list[str] = []
    #: Options of the trackers by name, such as `{wandb: {project: llada}}`; each tracker's are in docs/tracking.md.
    options: dict[str, dict[str, Any]] = {}
    #: Log the gradient noise scale, in packs; `auto`: if a step has two micro-batches and packs are not split.
    noise_scale: bool | Literal["auto"] = "auto"
    #: Number of bins of the noise level whose losses are logged separately; 0: none.
    levels: int = Field(default=5, ge=0, le=100)
    #: Profile some steps with torch's profiler.
    profile: ProfileConfig = ProfileConfig()
