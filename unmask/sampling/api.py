"""`sample` and `stream`: continue prompts, or fill the holes of a text, with a trained model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.errors import UserError
from unmask.models.logits import Logits
from unmask.objectives import Decoding
from unmask.sampling.canvas import Canvas, Fill
from unmask.sampling.options import Options
from unmask.sampling.session import Given, Prompt, Session, Work

Report = Callable[[Canvas], None]


class Hole(NamedTuple):
    """What one hole was filled with; text: "" without a tokeniser."""

    token: list[int]
    text: str


@dataclass(frozen=True)
class Sample:
    """token: the new tokens, without the end token; text: their text ("" without a tokeniser); passes: forward passes
    it took; prompt: which one it continues, and number: which sample of it; holes: token and text one by one."""

    token: list[int]
    text: str
    passes: int
    interrupted: bool
    canvas: Canvas
    holes: list[Hole]
    prompt: int = 0
    number: int = 0


@overload
def sample(
    model: PreTrainedModel | Logits,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    *,
    suffix: Given | None = ...,
    decoding: Decoding | None = ...,
    end_tokens: Sequence[int] = ...,
    report: Report | None = ...,
    **options: Any,
) -> Sample: ...


@overload
def sample(
    model: PreTrainedModel | Logits,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: list[str] | list[Fill] | list[list[int]],
    *,
    suffix: Any = ...,
    decoding: Decoding | None = ...,
    end_tokens: Sequence[int] = ...,
    report: Report | None = ...,
    **options: Any,
) -> list[Sample]: ...


def sample(
    model: PreTrainedModel | Logits,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Any,
    *,
    suffix: Any = None,
    decoding: Decoding | None = None,
    end_tokens: Sequence[int] = (),
    report: Report | None = None,
    **options: Any,
) -> Any:
    """Continue `prompt` by `length` tokens or up to an end token; with a `suffix`, fill a hole of `length` before it.

    prompt: text, token ids, or `Fill.parse("def f(x):[MASK:20]return y")`, whose holes are filled; a list of these
    gives a list of samples, `num_samples` of each, sampled together: each is what it would be alone with the seed
    `seed` + its number. suffix: text or token ids, or for a list of prompts a list of these. decoding: how the model
    was trained (`objective.decoding`); a folder exported by unmask carries it. end_tokens: ids that end a continuation
    as EOS does. report: called with a canvas after each of its steps, for a live view. options: the fields of
    `Options`. Ctrl-C ends the sampling; what was committed so far is returned, `interrupted` set.

    Right context: a `full` model sees the whole text. A `block` model sees what shares the block being filled and
    no more to the right; the block grid is moved (by dropping a few leading prompt tokens) so that this is much. A hole
    longer than a block is filled block by block. A `causal` model refuses holes. End tokens are never put into a
    hole, and the mask token never anywhere.
    """
    session = Session(model, tokenizer, Options.parse(options, "sample"), decoding, end_tokens)
    several = _is_several(prompt)
    if session.options.num_samples > 1 and not several:
        raise UserError(
            f"sample: num_samples={session.options.num_samples} gives a list: write the prompt in one, [prompt]"
        )
    prompts = list(prompt) if several else [prompt]
    suffixes: list[Any] = list(suffix) if several and _is_several(suffix) else [suffix] * len(prompts)
    if len(suffixes) != len(prompts):
        raise UserError(f"sample: {len(suffixes)} suffixes for {len(prompts)} prompts; give one each, or one for all")
    works = session.works(prompts, suffixes)
    for _ in session.batches(works, report or (lambda canvas: None)):
        continue
    found = [result(session, work) for work in works]
    return found if several else found[0]


class Piece(NamedTuple):
    """Tokens of a hole that are final, and the text they add: concatenated, the texts are the sample's."""

    hole: int
    token: list[int]
    text: str


def stream(
    model: PreTrainedModel | Logits,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    *,
    suffix: Given | None = None,
    decoding: Decoding | None = None,
    end_tokens: Sequence[int] = (),
    **options: Any,
) -> Iterator[Piece]:
    """As `sample` of one prompt, but every finished block at once; Ctrl-C is raised to whoever iterates."""
    session = Session(model, tokenizer, Options.parse(options, "sample"), decoding, end_tokens)
    if _is_several(prompt) or session.options.num_samples > 1:
        raise UserError("stream: it takes one prompt and gives one sample of it; use sample for several")
    [work] = session.works([prompt], [suffix])
    return pieces(session, work)


def pieces(session: Session, work: Work) -> Iterator[Piece]:
    """Fill a canvas, and hand out what is final as its sampler finishes blocks."""
    hole, sent, said = 0, 0, ""
    for _ in session.steps([work]):
        while hole < len(work.canvas.holes):
            token = work.canvas.answer(hole, work.canvas.done)
            whole = work.canvas.done >= work.canvas.holes[hole][1] or work.canvas.finished
            text = session.tokenizer.decode(token) if session.tokenizer else ""
            if not whole and text.endswith("\ufffd"):
                text = said  # a character's bytes may go on in the next block
            if len(token) > sent or text != said:
                yield Piece(hole, token[sent:], text[len(said) :])
                sent, said = len(token), text
            if not whole:
                break
            hole, sent, said = hole + 1, 0, ""


def result(session: Session, work: Work) -> Sample:
    """What became of a canvas."""
    found = [work.canvas.answer(hole) for hole in range(len(work.canvas.holes))]
    holes = [Hole(token, session.tokenizer.decode(token) if session.tokenizer else "") for token in found]
    return Sample(
        token=[token for hole in holes for token in hole.token],
        text="".join(hole.text for hole in holes),
        passes=work.passes,
        interrupted=work.interrupted,
        canvas=work.canvas,
        holes=holes,
        prompt=work.prompt,
        number=work.number,
    )


def _is_several(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts: anything iterable whose first member is not a token id."""
    if isinstance(prompt, str | Fill) or not hasattr(prompt, "__len__") or not len(prompt):
        return False
    first = next(iter(prompt))
    if isinstance(first, str | Fill):
        return True
    try:
        operator.index(first)
    except TypeError:
        return hasattr(first, "__len__")
    return False
