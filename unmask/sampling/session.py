"""A model made ready for sampling: prompts become canvases, and canvases are filled, several at a time.

The samplers of all canvases of a batch are stepped together: each says which forward pass it needs next, one pass over
all their rows answers them, and a canvas that is finished leaves. Every canvas has random numbers of its own, so
that it is filled with what it would be filled with alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.beginnings import beginning, begun
from unmask.data.encoding import Encoder
from unmask.errors import UserError
from unmask.models import special
from unmask.models.decoder import spec_of
from unmask.models.families import family_of_model
from unmask.models.logits import Logits, Whole
from unmask.models.positions import limit_of
from unmask.objectives import Decoding, rebuild
from unmask.registry import Registry
from unmask.sampling.canvas import Canvas, Fill, continuation, infill
from unmask.sampling.fit import METHODS, refuse_unfit
from unmask.sampling.network import Network, Pass
from unmask.sampling.options import WHOLE, Options
from unmask.sampling.strategies import strategies

samplers = Registry(
    "sampler",
    {
        "block": "unmask.sampling.drivers:block",
        "full": "unmask.sampling.drivers:full",
        "causal": "unmask.sampling.drivers:causal",
        "prefix_cache": "unmask.sampling.dual_cache:prefix_cache",
        "dual_cache": "unmask.sampling.dual_cache:dual_cache",
        "canvas": "unmask.sampling.diffusion_gemma:Sampler",
    },
)

#: A text, or token ids.
Given = str | Sequence[int]
Prompt = Given | Fill


@dataclass
class Work:
    """A canvas to fill. banned: bool [vocabulary], tokens it never takes; number: which sample of its prompt it is;
    passes: forward passes it took part in."""

    canvas: Canvas
    banned: Tensor
    prompt: int
    number: int
    passes: int = 0
    interrupted: bool = False


class Session:
    """model, tokenizer, decoding, end_tokens: as of `sample`. Raises UserError for options that do not go together."""

    def __init__(
        self,
        model: PreTrainedModel | Logits,
        tokenizer: PreTrainedTokenizerBase | None,
        options: Options,
        decoding: Decoding | None = None,
        end_tokens: Sequence[int] = (),
    ):
        self.logits = self._logits(model)
        model = self.logits.model
        if decoding is not None and not isinstance(decoding, Decoding):
            what = "decoding is the objective's, load(folder).objective.decoding"
            raise UserError(f"sample: {what}, not {_kind(decoding)}")
        self.model, self.tokenizer, self.options = model, tokenizer, options
        named = options.trained_by()
        self.decoding = named.decoding if named is not None else decoding or _recorded(model)
        self.method = options.method or self.decoding.kind
        self.sampler = samplers[self.method]
        refuse_unfit(self.decoding, options)
        if hasattr(self.sampler, "of"):  # with settings that a model's generation_config.json may hold
            self.sampler = self.sampler.of(model)
        strategies[options.strategy]
        options.refuse_unused(self.method, options.block_size or self.decoding.block_size)
        if self.method in ("prefix_cache", "dual_cache") and any(spec_of(model).windows):
            raise UserError(
                f"sample: method={self.method} is for models whose layers all see the whole text, and "
                f"{type(model).__name__} has sliding windows: use method=full"
            )
        self.mask: int | None = getattr(model.config, "mask_token_id", None)
        if options.mask_token_id is not None:
            self.mask = self._checked_mask(options.mask_token_id)
        if self.mask is None and self.decoding.kind not in ("causal", "canvas"):
            raise UserError("sample: the model's config has no mask_token_id; set it, or load the model with unmask")
        self.ends = frozenset(special.end_tokens(model, tokenizer, self.logits.vocabulary))
        self.end_with([*end_tokens, *_published_ends(model)])

    @staticmethod
    def _logits(model: PreTrainedModel | Logits) -> Logits:
        """The model as samplers call it; UserError for what is none."""
        if not isinstance(model, PreTrainedModel):
            if isinstance(getattr(model, "model", None), PreTrainedModel) and callable(model):
                return model
            raise UserError(f"sample: the model is one of transformers, such as load(folder).model, not {_kind(model)}")
        if model.get_output_embeddings() is None:
            raise UserError(f"sample: {type(model).__name__} has no output projection; load the model for causal LM")
        return Whole(model)

    def _checked_mask(self, token: int) -> int:
        """The mask token that is asked for; UserError where the model has no such row, or needs none."""
        rows = self.logits.vocabulary
        if self.method in ("causal", "canvas"):
            raise UserError(f"sample: mask_token_id={token} has no effect here: method={self.method} masks nothing")
        if token >= rows:
            raise UserError(f"sample: mask_token_id={token} does not fit the model's {rows} embeddings")
        return token

    def end_with(self, tokens: Sequence[int]) -> None:
        """Let these tokens, too, end a continuation."""
        self.ends |= frozenset(tokens)
        self._never = {infilling: self._banned(infilling) for infilling in (False, True)}

    # prompts

    def works(
        self, prompts: Sequence[Prompt], suffixes: Sequence[Given | None], names: Sequence[str] = ()
    ) -> list[Work]:
        """A Work for every sample of every prompt, in order; UserError for a prompt that cannot be one.

        names: where each prompt is from, for that error; of several without names, it tells the number.
        """
        made = []
        for place, (prompt, suffix) in enumerate(zip(prompts, suffixes, strict=True)):
            for number in range(self.options.num_samples):
                try:
                    canvas = self.canvas(prompt, suffix)
                except UserError as error:
                    name = names[place] if names else f"prompt {place + 1}" if len(prompts) > 1 else ""
                    raise UserError(f"{name}: {error}" if name else str(error)) from None
                made.append(Work(canvas, self._never[not canvas.ends], place, number))
        return made

    def canvas(self, prompt: Prompt, suffix: Given | None = None) -> Canvas:
        """What is to be filled: a continuation, a hole before `suffix`, or the holes of a Fill."""
        # Some models need no mask token; any id stands in for it, since open positions are never fed to them.
        filler = self.mask if self.mask is not None else 0
        if isinstance(prompt, Fill):
            self._refuse_beside_holes(suffix)
            fill = prompt
        else:
            fill = Fill((prompt, "" if suffix is None else suffix), (self.options.length,))
        parts = [self._ids(part, follows=number > 0) for number, part in enumerate(fill.parts)]
        if suffix is None and not isinstance(prompt, Fill):
            canvas = continuation(parts[0], self.options.length, filler, ends=self.ends)
            if self.method == "canvas":
                canvas.lengthen(self.options.block_size or self.decoding.block_size or 1)
        elif self.method == "canvas":
            raise UserError("sample: this model sees nothing to the right of what it fills; leave holes and suffix out")
        else:
            size = 1 if self.method in (*WHOLE, "causal") else self.options.block_size or self.decoding.block_size or 1
            kept = len(self.begin) if isinstance(fill.parts[0], str) else 0
            canvas = infill(parts, fill.holes, filler, block_size=size, kept=kept)
        needs_first = self.decoding.shift or self.method in ("causal", "canvas")
        if self.method in METHODS and needs_first and canvas.open[0]:
            raise UserError("sample: the prompt is empty, and this model predicts nothing without a token before it")
        limit = limit_of(self.model.config)
        if limit is not None and len(canvas) > limit.tokens:
            raise UserError(
                f"sample: a text of {len(canvas):,} tokens, {sum(fill.holes):,} of them to fill, does not fit the "
                f"model's {limit.tokens:,} positions ({limit.name}); shorten it, or lower length"
            )
        return canvas

    def _refuse_beside_holes(self, suffix: Given | None) -> None:
        if suffix is not None:
            raise UserError("sample: a text with holes says itself what comes after them; leave the suffix out")
        if "length" in self.options.model_fields_set:
            raise UserError(
                f"sample: length={self.options.length} has no effect here: it needs a prompt, a text with holes gives "
                f"their sizes"
            )

    @cached_property
    def encoder(self) -> Encoder:
        """Texts as training data are read: one that spells the mask token is plain characters."""
        return Encoder(self.tokenizer, eos=False)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """What texts begin with."""
        return beginning(self.tokenizer)

    def _ids(self, text: str | Sequence[int], follows: bool = False) -> list[int]:
        """follows: it does not begin a text, but goes on with one."""
        if not isinstance(text, str):
            try:
                token = [operator.index(one) for one in text]
            except TypeError:
                raise UserError(f"sample: a prompt or suffix is text or a list of token ids, not {text!r}") from None
        elif self.tokenizer is None:
            if text:
                raise UserError("sample: this model has no tokeniser, so that a prompt or suffix must be token ids")
            return []
        else:
            token = self.encoder.encode([text], [follows])[0].tolist() if text else []
            if not follows and not begun(token, self.begin):
                token = [*self.begin, *token]
        rows = self.logits.vocabulary
        for given in token:
            if not 0 <= given < rows or given == self.mask:
                what = "the mask token" if given == self.mask else f"outside the model's {rows} embeddings"
                raise UserError(f"sample: the prompt or suffix holds token id {given}, which is {what}")
        return token

    def _banned(self, infilling: bool) -> Tensor:
        """bool [vocabulary]: the mask token, end tokens in a hole, and rows the tokeniser has no text for."""
        size = self.logits.vocabulary
        banned = torch.zeros(size, dtype=torch.bool)
        if self.tokenizer is not None:
            known = [index for index in self.tokenizer.get_vocab().values() if index < size]
            banned[:] = True
            banned[known] = False
        for token in self.ends:
            if not 0 <= operator.index(token) < size:
                raise UserError(f"sample: the end token {token} is outside the model's vocabulary of {size}")
            banned[token] = banned[token] or infilling
        if self.mask is not None:
            banned[self.mask] = True
        return banned.to(self.logits.device)

    # sampling

    def batches(
        self, works: Sequence[Work], report: Callable[[Canvas], None] = lambda canvas: None
    ) -> Iterator[Sequence[Work]]:
        """The works, filled, `batch_size` at a time. Ctrl-C ends all of it; what was committed stays."""
        interrupted = False
        for first in range(0, len(works), self.options.batch_size):
            batch = works[first : first + self.options.batch_size]
            try:
                with closing(self.steps(batch)) as changes:
                    for work in () if interrupted else changes:
                        report(work.canvas)
            except KeyboardInterrupt:
                interrupted = True
            for work in batch:
                work.interrupted = interrupted and not work.canvas.finished
            yield batch

    def steps(self, works: Sequence[Work]) -> Generator[Work]:
        """Fill the canvases of `works` together; yields a work whenever its canvas has changed."""
        network = Network(self.logits, self.decoding, [work.canvas for work in works], cached=self.options.cache)
        samplings = [self._sampling(work) for work in works]
        training = self.model.training
        self.model.eval()
        try:
            answers: dict[int, Tensor | None] = dict.fromkeys(range(len(works)))
            while answers:
                asked: dict[int, Pass] = {}
                changed = []
                for number, logits in answers.items():
                    work, before = works[number], works[number].canvas.steps
                    try:
                        asked[number] = samplings[number].send(logits)
                    except StopIteration:
                        work.canvas.done = work.canvas.stop
                    if work.canvas.steps > before or number not in asked:
                        changed.append(work)
                yield from changed
                answers = {
                    number: logits.masked_fill(works[number].banned, -torch.inf) if len(logits) else logits
                    for number, logits in network.run(asked).items()
                }
                for number in asked:
                    works[number].passes = network.taken[number]
        finally:
            self.model.train(training)

    def _sampling(self, work: Work) -> Generator[Pass, Any, None]:
        seed = (self.options.seed + work.number) % 2**63
        return self.sampler(work.canvas, self.decoding, self.options.model_copy(update={"seed": seed}))


def _recorded(model: PreTrainedModel) -> Decoding:
    record = getattr(model.config, "unmask", None)
    if not record:
        raise UserError("sample: the model does not say how it was trained; pass decoding=objective.decoding")
    return rebuild(record["name"], record["options"]).decoding


def _published_ends(model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer of the model's family beside its tokeniser's EOS."""
    rows = spec_of(model).vocabulary
    return [token for token in family_of_model(model).end_tokens if token < rows]


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
