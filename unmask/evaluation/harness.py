"""unmask as a model of lm-eval (EleutherAI's lm-evaluation-harness), which is imported with this module.

Registered as "unmask": `lm_eval.simple_evaluate(model="unmask", model_args={"pretrained": "runs/chat"}, tasks=[...])`.
Likelihoods are those of `unmask.evaluation.likelihood`, answers are written by the samplers of `unmask.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from unmask.data.beginnings import beginning, begun
from unmask.data.chat import rendered
from unmask.data.encoding import Encoder
from unmask.errors import UserError
from unmask.evaluation.likelihood import log_likelihoods
from unmask.models import RowModel
from unmask.models.positions import limit_of
from unmask.runs.open import OpenModel, open_model
from unmask.sampling.api import result
from unmask.sampling.options import Options
from unmask.sampling.session import Session

#: Noise draws of a likelihood, where none are asked for.
DRAWS = 32
#: Tokens of an answer for which neither its task nor the user sets a length: lm-eval's own default.
LENGTH = 256
#: What a task may ask of a sampler and we do without: our caches have options of their own.
IDLE = ("use_cache",)


@register_model("unmask")
class UnmaskLM(TemplateLM):
    """A run's folder, one of its steps, an exported folder, or an opened model, as lm-eval asks for it.

    draws: noise draws of every likelihood; seed: of these; options: of the sampler, in place of what a task says.
    `ranked`: names of tasks that compare likelihoods and never ask whether an answer is the greedy one.
    """

    def __init__(
        self,
        pretrained: str | OpenModel,
        draws: int = DRAWS,
        seed: int = 0,
        device: str = "cpu",
        batch_size: int | None = None,
        **options: Any,
    ):
        super().__init__()
        if isinstance(pretrained, OpenModel):
            self.opened = pretrained
        else:
            own = {name: options.get(name) for name in ("mask_token_id", "objective")}
            self.opened = open_model(pretrained, device=device, **own)
        if self.opened.tokenizer is None:
            where = f"{pretrained}: " if isinstance(pretrained, str) else "the model "
            raise UserError(f"{where}has no tokeniser, and tasks are texts")
        self.tokenizer = self.opened.tokenizer
        #: Whether texts are conversations: their template says what these begin with.
        self._templated = False
        self.begin, self._encoder = beginning(self.tokenizer), Encoder(self.tokenizer, eos=False)
        self.draws, self.seed = draws, seed
        self.given = options | ({} if batch_size is None else {"batch_size": batch_size})
        self.ranked: frozenset[str] = frozenset()
        self._ask_greedy: list[bool] = []
        self._session(1)  # refuses options that do not go together before anything runs

    @property
    def eot_token_id(self) -> int:
        """What stands before a text without a context, where texts do not begin with a token."""
        end = self.tokenizer.bos_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        if end is None:
            raise UserError("the tokeniser has neither an end nor a beginning token to stand before an empty context")
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: the beginning token, where texts have one."""
        return self.begin[-1] if self.begin else self.eot_token_id

    @property
    def max_length(self) -> int | None:
        """Positions of the model, where its config limits them."""
        limit = limit_of(self.opened.model.config)
        return None if limit is None else limit.tokens

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As training data is read: with the tokeniser's beginning token, unless the text has it already."""
        token = self._encoder.encode([string])[0].tolist() if string else []
        bare = add_special_tokens is False or self._templated or begun(token, self.begin)
        return token if bare else [*self.begin, *token]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval splits them; a continuation that its context's last token swallows is encoded by itself."""
        before, after = super()._encode_pair(context, continuation)
        return before, after or self.tok_encode(continuation, add_special_tokens=False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._templated = True
        return rendered(
            self.tokenizer,
            chat_history,
            "the chat template cannot be used",
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._ask_greedy = [request.task_name not in self.ranked for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        nats = self._log_likelihoods(pairs)
        greedy = self._greedy([pair for pair, asked in zip(pairs, self._ask_greedy, strict=True) if asked])
        wanted = iter(greedy)
        found = [(value, next(wanted) if asked else False) for value, asked in zip(nats, self._ask_greedy, strict=True)]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Whole texts, in windows of the model's positions, each token scored once."""
        found = []
        for (text,) in [request.args for request in requests]:
            token = self.tok_encode(text, add_special_tokens=False)
            length = self.max_length or len(token) + 1
            windows = map(make_disjoint_window, get_rolling_token_windows(token, self.prefix_token_id, length - 1, 1))
            found.append(sum(self._log_likelihoods(list(windows))))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def _log_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """An empty continuation is certain."""
        some = [pair for pair in pairs if pair[1]]
        row_model = RowModel(self.opened.model)
        guidance = self._session(1).options.guidance
        scored = iter(
            log_likelihoods(row_model, self.opened.objective, some, seed=self.seed, draws=self.draws, guidance=guidance)
        )
        return [float(next(scored)) if continuation else 0.0 for _, continuation in pairs]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The end of the context that leaves room for the continuation and for one token before it."""
        if self.max_length is None:
            return context, continuation
        room = self.max_length - len(continuation)
        if room < 1:
            raise UserError(
                f"a task asks for the likelihood of {len(continuation):,} tokens after a context, which do not fit the "
                f"model's {self.max_length:,} positions; leave the task out"
            )
        return self._end_of(context, room), continuation

    def _greedy(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Whether the model itself would write the continuation: one token at a time, the most confident first."""
        found = [True] * len(pairs)
        for length in sorted({len(continuation) for _, continuation in pairs if continuation}):
            places = [place for place, (_, continuation) in enumerate(pairs) if len(continuation) == length]
            causal = self.opened.objective.decoding.kind == "causal"
            session = self._built({"length": length} | ({} if causal else {"strategy": "low_confidence"}))
            for place, answer in zip(places, _answers(session, [pairs[place][0] for place in places]), strict=True):
                found[place] = answer.token == list(pairs[place][1])
        return found

    # generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut at the first of its stop strings; requests that ask alike are sampled together."""
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        texts = [""] * len(requests)
        for places in alike.values():
            wanted = dict(normalize_gen_kwargs(requests[places[0]].args[1], LENGTH))
            stops, session = [stop for stop in wanted.pop("until") if stop], self._asked(wanted)
            # A stop that is one token ends the sampling; any other stop cuts what was sampled.
            session.end_with([int(token[0]) for token in self._encoder.encode(stops) if len(token) == 1])
            prompts = [self._prompt(requests[place].args[0], session.options.length) for place in places]
            for place, answer in zip(places, _answers(session, prompts), strict=True):
                texts[place] = _cut(answer.text, stops)
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return texts

    def _asked(self, wanted: dict[str, Any]) -> Session:
        """A session as a task asks for it, and the user instead; UserError for what our samplers do not know."""
        temperature, sampled = wanted.pop("temperature", 0.0), wanted.pop("do_sample", False)
        length, top_p = wanted.pop("max_gen_toks"), wanted.pop("top_p", None)
        unknown = [name for name in wanted if name not in IDLE]
        if unknown:
            raise UserError(f"a task asks for generation_kwargs.{unknown[0]}, which unmask's samplers do not have")
        return self._session(length, temperature if sampled else 0.0, top_p)

    def _session(self, length: int, temperature: float = 0.0, top_p: float | None = None) -> Session:
        drawn = {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p}) if temperature else {}
        return self._built({"length": length} | drawn | self.given)

    def _built(self, options: dict[str, Any]) -> Session:
        settings = Options.parse(options, "eval")
        if settings.num_samples > 1:
            raise UserError(f"eval: num_samples={settings.num_samples} has no effect here: a task takes one answer")
        return Session(self.opened.model, self.tokenizer, settings, self.opened.objective.decoding)

    def _prompt(self, text: str, length: int) -> list[int]:
        """The end of the prompt that leaves room for the answer."""
        token = self.tok_encode(text)
        if self.max_length is None:
            return token
        room = self.max_length - length
        if room < 1:
            raise UserError(
                f"an answer of {length:,} tokens does not fit the model's {self.max_length:,} positions; "
                f"set a smaller length=..."
            )
        return self._end_of(token, room)

    def _end_of(self, token: list[int], room: int) -> list[int]:
        """The last `room` tokens of a context, what it begins with among them."""
        kept = len(self.begin) if len(token) > room > len(self.begin) and begun(token, self.begin) else 0
        return [*token[:kept], *token[len(token) - min(room, len(token)) + kept :]]


def _answers(session: Session, prompts: Sequence[list[int]]) -> list[Any]:
    """A Sample for each prompt; Ctrl-C ends all."""
    works = session.works(prompts, [None] * len(prompts))
    for batch in session.batches(works):
        if any(work.interrupted for work in batch):
            raise KeyboardInterrupt
    return [result(session, work) for work in works]


def _cut(text: str, stops: Sequence[str]) -> str:
    """What comes before the first stop string."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
