"""Entropy-bound sampling of canvases, as DiffusionGemma decodes: transformers' `generate`, draw by draw.

    x_N ~ U(vocabulary) on a canvas;  for n = N .. 1, given the clean tokens before it and the last step's z (if any):
    z = logits(x_n) / T_n,  T_n = low + (high - low) n / N;   d ~ softmax(z);   H = entropy(softmax(z))
    accept d_i, in order of rising H, while the sum of H so far, without H_i itself, is at most `gamma`; the others
    become U(vocabulary) again. Stop when argmax z has not changed and mean H < `confidence`; emit argmax z.

Canvases are counted from the end of the prompt and always whole: what the last one has beyond `length` is thrown away.
The bound: Ben-Hamu et al. 2505.24857.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling.canvas import Canvas
from unmask.sampling.drivers import Steps
from unmask.sampling.network import Clean, Noisy
from unmask.sampling.options import Options


class Sampler(NamedTuple):
    """The sampler, with what a folder's generation_config.json may say otherwise; the defaults are transformers'."""

    steps: int = 48
    gamma: float = 0.1
    low: float = 0.4
    high: float = 0.8
    stability: int = 1
    confidence: float = 0.005

    @classmethod
    def of(cls, model: Any) -> Sampler:
        """The sampler of a model, by its generation config."""
        config = getattr(model, "generation_config", None)
        named = {"steps": "max_denoising_steps", "low": "t_min", "high": "t_max"}
        named |= {"stability": "stability_threshold", "confidence": "confidence_threshold"}
        found = {ours: getattr(config, theirs, None) for ours, theirs in named.items()}
        found["gamma"] = getattr(getattr(config, "sampler_config", None), "entropy_bound", None)
        return cls(**{name: value for name, value in found.items() if value is not None})

    def __call__(self, canvas: Canvas, decoding: Decoding, options: Options) -> Steps:
        """Canvas by canvas; `options.steps` and `options.gamma`, where given, win over the model's."""
        size = options.block_size or decoding.block_size
        if size is None:
            raise UserError("sample: block_size is needed for a model that was not trained with canvases")
        gamma = options.gamma if "gamma" in options.model_fields_set else self.gamma
        settings = self._replace(gamma=gamma, steps=options.steps or self.steps)
        noise, cached = torch.Generator().manual_seed(options.seed), 0
        for start in range(canvas.start, canvas.stop, size):
            # The last row's logits, for nothing but the size of the vocabulary.
            vocabulary = (yield Clean(cached, start, 1, torch.tensor([start - 1]))).shape[1]
            cached = start
            best = yield from _denoised(canvas, (start, start + size), vocabulary, settings, noise)
            canvas.token[start : start + size] = best
            stop = min(start + size, canvas.stop)
            canvas.fill(torch.arange(start, stop), best[: stop - start])
            canvas.done = stop
            if canvas.finished:
                return


def _denoised(canvas: Canvas, part: tuple[int, int], vocabulary: int, settings: Sampler, noise: torch.Generator) -> Any:
    """The tokens of canvas [start, stop), int64."""
    start, stop = part
    rows, size = torch.arange(start, stop), stop - start
    token = torch.randint(0, vocabulary, (size,), generator=noise)
    logits: Tensor | None = None
    before: list[Tensor] = []
    best = token
    for step in range(settings.steps, 0, -1):
        canvas.token[start:stop] = token
        raw = yield Noisy(start, stop, rows, logits)
        logits = raw / (
            settings.low + (settings.high - settings.low) * torch.tensor(step, device=raw.device).div(settings.steps)
        )
        drawn = torch.multinomial(logits.softmax(-1, dtype=torch.float32).cpu(), 1, generator=noise)[:, 0]
        best = logits.argmax(-1).cpu()
        entropy = torch.distributions.Categorical(logits=logits).entropy().cpu()
        accepted = within(entropy, settings.gamma)
        token = torch.where(accepted, drawn, torch.randint(0, vocabulary, (size,), generator=noise))
        recent = before[-settings.stability :] if settings.stability else []
        stable = len(recent) == settings.stability and all(torch.equal(each, best) for each in recent)
        before.append(best)
        if stable and entropy.mean() < settings.confidence:
            break
    return best


def within(entropy: Tensor, gamma: float) -> Tensor:
    """bool [n]: the tokens of lowest entropy whose sum, without the largest of them, is at most `gamma` (nats)."""
    rising, order = entropy.sort()
    return torch.zeros(len(entropy), dtype=torch.bool).scatter(0, order, rising.cumsum(0) - rising <= gamma)
