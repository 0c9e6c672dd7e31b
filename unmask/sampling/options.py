"""What a user may ask of a sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from unmask.config import Section, apply_override
from unmask.errors import UserError
from unmask.registry import nearest
from unmask.sampling.presets import PRESETS

if TYPE_CHECKING:
    from unmask.objectives import Objective

#: Options that only one of the built-in strategies reads.
OWN = {"threshold": "threshold", "dynamic": "factor", "entropy": "gamma"}
#: Strategies that commit exactly as many tokens as they must, by a score.
SCORES = ("low_confidence", "low_entropy", "margin")
#: Options that choose how a model is decoded: beside one of them the preset of its family is not taken.
CHOICES = ("preset", "method", "strategy", *OWN.values(), "schedule", "sub_block_size")
#: The preset that is none.
NONE = "none"
#: The built-in strategies; what one of somebody else's reads is not known.
STRATEGIES = ("low_confidence", "threshold", "dynamic", "entropy", "low_entropy", "margin", "random")
#: The samplers that see the whole sequence, and of these the ones with an approximate cache.
WHOLE = ("full", "prefix_cache", "dual_cache")


class Options(Section):
    """Options of every sampler."""

    model_config = ConfigDict(frozen=True)

    #: Tokens to generate, or the size of the hole to fill.
    length: int = Field(default=128, ge=1)
    #: Published decoding, whose options become the defaults: llada, dream, dream_chat, fast_dllm, fast_dllm_v2, sdar or
    #: llada2; none: not even that of the model's family.
    preset: str | None = None
    #: How the model was trained, if its folder does not record it: an objective's name, with its options after commas
    #: (`mdlm,shift=true`); for objectives with blocks, `block_size` may give their size.
    objective: str | None = None
    #: The model's mask token, if its folder does not record it.
    mask_token_id: int | None = Field(default=None, ge=0)
    #: Sampler; empty: the one for which the model was trained.
    method: str | None = None
    #: Tokens denoised together; empty: the model's block size, or for `full` everything at once.
    block_size: int | None = Field(default=None, ge=1)
    #: Which tokens are committed at a step: low_confidence, threshold, dynamic, entropy, low_entropy, margin or random.
    strategy: str = "threshold"
    #: For `threshold`: commit every token whose probability exceeds this, always at least one; 1 turns it off.
    threshold: float = Field(default=0.9, ge=0, le=1)
    #: For `dynamic`: commit the n most confident tokens, n the largest with (n + 1)(1 - confidence of the n-th) less.
    factor: float = Field(default=1.0, gt=0)
    #: For `entropy`: commit the largest set whose entropies (nats), without the largest one, sum to at most this.
    gamma: float = Field(default=0.1, ge=0)
    #: For `block`: fill a block from left to right, this many tokens at a time; empty: all at once.
    sub_block_size: int | None = Field(default=None, ge=1)
    #: Tokens committed at a step: even, masked / remaining steps (LLaDA); fixed, block size / steps (SDAR);
    #: timesteps, floor(masked (1 - s/t)) (Dream); independent, each with probability 1 - s/t (Dream's origin).
    schedule: Literal["even", "fixed", "timesteps", "independent"] = "even"
    #: Denoising steps per block: each commits at least masks / steps tokens; empty: at least one token. For
    #: canvases (DiffusionGemma) the maximum; empty: that of generation_config.json, else 48.
    steps: int | None = Field(default=None, ge=1)
    #: 0 takes the most probable token.
    temperature: float = Field(default=0.0, ge=0)
    #: Draw from the smallest set of tokens with this much probability.
    top_p: float = Field(default=1.0, gt=0, le=1)
    #: Draw from this many of the most probable tokens, after top_p; empty: from all of them.
    top_k: int | None = Field(default=None, ge=1)
    #: Confidences are probabilities after temperature, top_p and top_k; otherwise those of the model.
    tempered: bool = False
    #: For `low_confidence`, `low_entropy`, `margin`: draw committed tokens from softmax(score / alg_temp); 0: the best.
    alg_temp: float = Field(default=0.0, ge=0)
    #: For full-sequence models: classifier-free guidance w, logits u + (w + 1)(c - u), u with the prompt masked.
    guidance: float = Field(default=0.0, ge=0)
    #: Random seed; sample n of a prompt has the seed seed + n.
    seed: int = Field(default=0, ge=0, lt=2**63)
    #: Samples per prompt.
    num_samples: int = Field(default=1, ge=1)
    #: Texts that go through the model together.
    batch_size: int = Field(default=16, ge=1)
    #: Keep the keys and values of finished blocks; false: recompute them at every step, for comparison.
    cache: bool = True

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, values: Any, handler: ModelWrapValidatorHandler[Options]) -> Options:
        """A preset's options are defaults: they do not count as given."""
        name = values.get("preset") if isinstance(values, dict) else None
        if not isinstance(name, str) or name == NONE:
            return handler(values)
        if name not in PRESETS:
            known = [*PRESETS, NONE]
            raise UserError(f"sample: unknown preset {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        options = handler(PRESETS[name] | values)
        options.model_fields_set.intersection_update(values)
        return options

    @property
    def filters(self) -> bool:
        """Whether improbable tokens are never drawn."""
        return self.top_p < 1 or self.top_k is not None

    def trained_by(self) -> Objective | None:
        """The objective that is named, if one is."""
        if self.objective is None:
            return None
        from unmask.objectives import named

        return named(self.objective, **({} if self.block_size is None else {"block_size": self.block_size}))

    def of_family(self, preset: str) -> Options:
        """These options with the preset of the model's family for the others, unless they choose a decoding already."""
        if self.model_fields_set.intersection(CHOICES):
            return self
        return type(self).parse({**self.model_dump(include=self.model_fields_set), "preset": preset}, "sample")

    def refuse_unused(self, method: str, block_size: int | None) -> None:
        """UserError for an option that was given and plays no part in this sampling, whatever its value (an empty one
        counts as not given); of a sampler of one's own nothing is known. block_size: the one in force, if any."""
        needs = {}
        known = method in ("block", *WHOLE) and self.strategy in STRATEGIES
        if method == "causal":
            fills = (
                "block_size",
                "sub_block_size",
                "strategy",
                *OWN.values(),
                "alg_temp",
                "schedule",
                "steps",
                "tempered",
            )
            needs = dict.fromkeys(fills, "a sampler that fills masks, not method=causal")
        elif known:
            needs = {own: f"strategy={name}" for name, own in OWN.items() if name != self.strategy}
            if self.strategy not in SCORES:
                needs["alg_temp"] = f"strategy={', '.join(SCORES[:-1])} or {SCORES[-1]}"
        if method == "canvas":
            others = (
                "strategy",
                "threshold",
                "factor",
                "temperature",
                "top_p",
                "top_k",
                "schedule",
                "tempered",
                "alg_temp",
                "sub_block_size",
                "guidance",
            )
            return self._refuse(
                dict.fromkeys(others, "another sampler than method=canvas, which has a rule of its own")
            )
        if known and method != "block":
            needs["sub_block_size"] = "method=block; of a whole sequence, block_size says how it is filled"
        elif known and block_size and (self.sub_block_size or 0) >= block_size:
            needs["sub_block_size"] = f"blocks of more than {self.sub_block_size} tokens, and these have {block_size}"
        if known and method != "full":
            needs["guidance"] = "method=full, whose every pass sees the whole sequence"
        if method in WHOLE:
            needs["cache"] = f"clean blocks that can be kept, which method={method} has not"
        if self.temperature == 0:
            if not self.tempered or method == "causal":
                needs["top_p"] = needs["top_k"] = "a temperature above 0, or tempered=true where masks are filled"
            if not self.filters:
                needs["tempered"] = "a temperature above 0, top_p or top_k"
            draws = self.strategy == "random" or (self.alg_temp and self.strategy in SCORES)
            if self.num_samples > 1 and (method == "causal" or (known and not draws)):
                needs["num_samples"] = "something random: a temperature above 0, alg_temp, or strategy=random"
        if "guidance" not in needs and method not in (*WHOLE, "block"):
            needs["guidance"] = "method=full, whose every pass sees the whole sequence"
        self._refuse(needs)

    def _refuse(self, needs: dict[str, str]) -> None:
        for option, need in needs.items():
            value = getattr(self, option)
            if option in self.model_fields_set and value is not None:
                raise UserError(f"sample: {option}={value!r} has no effect here: it needs {need}")

    @classmethod
    def read(cls, overrides: list[str]) -> Options:
        """From a command line's `temperature=0.8 steps=4`."""
        tree: dict[str, Any] = {}
        presets = [override.partition("=")[2] for override in overrides if override.partition("=")[0] == "preset"]
        if len(presets) > 1:
            raise UserError(f"sample: {' and '.join(presets)} are two presets (--as NAME is preset=NAME); give one")
        for override in overrides:
            apply_override(tree, override, "option=value", "length=64")
        return cls.parse(tree, "sample")
