"""What the demo trains: an autoregressive model, then the diffusion model it is converted to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask import Config
from unmask.runs.folder import saved_steps

VOCABULARY = 4096
#: Stands for a length that is not known yet.
OPEN = 100_000
#: The part of the time that the autoregressive model gets.
FIRST = 0.45


@dataclass(frozen=True)
class Settings:
    """minutes: of training; the rest of the demo takes about one. steps (of each run), layers, files (0: all): for
    small trials."""

    minutes: float = 6.0
    out: Path = Path("unmask-demo")
    seed: int = 0
    steps: int | None = None
    layers: int = 2
    files: int = 0

    @property
    def first(self) -> Path:
        """The run of the autoregressive model."""
        return self.out / "ar"

    @property
    def exported(self) -> Path:
        """Its model, from which the second run starts."""
        return self.out / "ar-hf"

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"

    @property
    def train(self) -> Path:
        return self.out / "data" / "train"

    @property
    def held_out(self) -> Path:
        return self.out / "data" / "held-out"


def autoregressive(settings: Settings) -> Config:
    """The first run's own config where there is one (its length is fixed there), else the demo's."""
    model = {
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        # Three times the usual, with which so short a training gets further.
        "initializer_range": 0.06,
    }
    tree = {
        "model": {"config": model},
        "objective": {"name": "ar"},
        "optimizer": {"learning_rate": 6e-3},
        "training": {"seed": settings.seed},
        "checkpoint": {"path": str(settings.first)},
    }
    return _written(settings.first) or _config(settings, tree)


def diffusion(settings: Settings, first: Config) -> Config:
    """The second run's config, likewise; `first` is the first's, whose seed and precision it shares."""
    tree = {
        "model": {"name": str(settings.exported)},
        "objective": {"name": "fast_dllm_v2", "block_size": 8},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"seed": first.training.seed, "precision": first.training.precision},
        "checkpoint": {"path": str(settings.out)},
    }
    return _written(settings.out) or _config(settings, tree)


def _written(run: Path) -> Config | None:
    file = run / "config.yaml"
    if not file.exists() or not saved_steps(run):
        return None
    config = Config.load(file)
    # A run whose length followed from a slow pace may be shorter than the warm-up it began with.
    config.schedule.warmup = min(config.schedule.warmup, config.training.steps or OPEN)
    return config


def _config(settings: Settings, tree: dict[str, Any]) -> Config:
    """What both runs have in common, and `tree`."""
    small = settings.files > 0
    tree["data"] = {
        "train": str(settings.train),
        "validation": str(settings.held_out),
        "tokenizer": str(settings.tokenizer),
        "pack_tokens": 256 if small else 512,
    }
    # In minutes, many small steps teach more than few large ones.
    tree["training"] |= {"steps": settings.steps or OPEN, "batch_size": 1}
    # In steps: how many there will be is not known at the start.
    tree["schedule"] = {"warmup": min(60, settings.steps or OPEN), "floor": 0.05}
    tree["evaluation"] = {"packs": 2 if small else 32, "draws": 2}
    tree["log"] = {"console": "none"}
    return Config.parse(tree, "demo")
