"""A run small enough for a test: two Qwen3 layers of width 32 on random token ids."""

import json

import numpy as np
import torch

from unmask.config import Config, apply_override
from unmask.engine.optim.optimizers import optimizers
from unmask.training.trainer import Trainer

#: With learning rate 1, no clipping and no decay, an update is the gradient itself.
optimizers.add("plain_sgd", lambda parameters, config: torch.optim.SGD(parameters, lr=config.learning_rate))

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
PLAIN = ["optimizer.name=plain_sgd", "optimizer.learning_rate=1", "schedule.name=constant", "schedule.warmup=0"]


def documents(count=40, seed=0):
    """Records of 10 to 90 token ids below 63 (the mask token)."""
    generator = np.random.default_rng(seed)
    return [{"input_ids": generator.integers(0, 63, generator.integers(10, 90)).tolist()} for _ in range(count)]


def config(path, *overrides, objective=None, model=None):
    own = {"config": {**MODEL, **(model or {})}, "mask_token_id": 63}
    tree = {
        "model": {"config": model} if model and "text_config" in model else own,
        "data": {"pack_tokens": 128},
        "objective": dict(objective or {"name": "block_diffusion", "block_size": 8}),
        "optimizer": {"learning_rate": 0.003},
        "training": {"steps": 4, "batch_size": 2},
        "checkpoint": {"path": str(path)},
        "log": {"console": "none"},
    }
    for override in overrides:
        apply_override(tree, override)
    return Config.parse(tree)


def train(path, *overrides, callbacks=(), data=None, validation=None, **options):
    """Run to the end; returns the trainer, whose `run` holds the model."""
    trainer = Trainer(config=config(path, *overrides, **options), callbacks=callbacks)
    trainer.summary = trainer.train(data or documents(), validation)
    return trainer


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.run.model.named_parameters()}


def log(path):
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def losses(path):
    return [(record["step"], record["loss"]) for record in log(path) if record["kind"] == "step"]


def stop_at(step):
    def callback(trainer, record):
        if record["step"] == step:
            trainer.stop()

    return callback
