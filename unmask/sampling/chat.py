"""A conversation with a model that was trained on a chat template.

The template (Jinja, as transformers reads it) turns the messages so far into a prompt. An answer ends with EOS, with
the model's own end tokens (generation_config.json), or with the special token that the template puts after an answer.
"""

from __future__ import annotations

from typing import Any

from unmask.data.chat import rendered
from unmask.data.encoding import Encoder
from unmask.data.ends import special_tokens

#: Stands for an answer where the template is asked what it puts after one.
ANSWER = "unmask-answer"


class Conversation:
    """The messages so far. UserError for a tokeniser without a chat template, or one that cannot render these."""

    def __init__(self, tokenizer: Any, system: str | None = None):
        self.tokenizer = tokenizer
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self._render([*self.opening, {"role": "user", "content": "?"}], True)

    def reset(self) -> None:
        self.messages = []

    def ask(self, text: str, room: int | None = None) -> tuple[list[int], int]:
        """The prompt, in token ids, after `text` was said, and how many messages were left out.

        The oldest question and its answer are left out, again and again, while the prompt has more than `room` tokens.
        """
        kept, left_out = [*self.messages, {"role": "user", "content": text}], 0
        while True:
            prompt = encoded(self.tokenizer, self._render([*self.opening, *kept], True))
            if room is None or len(prompt) <= room or len(kept) == 1:
                return prompt, left_out
            kept, left_out = kept[2:], left_out + 2

    def answered(self, text: str, answer: str, left_out: int = 0) -> None:
        """Remember a question and its answer; `left_out`: as `ask` said."""
        said = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.messages = [*self.messages[left_out:], *said]

    def end_tokens(self) -> list[int]:
        """The special token that the template puts after an answer, if any."""
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = self._render([*self.opening, *answered], False).rpartition(ANSWER)
        token = encoded(self.tokenizer, after) if found and after else []
        return token[:1] if token and token[0] in special_tokens(self.tokenizer) else []

    def _render(self, messages: list[dict[str, str]], asking: bool) -> str:
        where = "the chat template cannot be used"
        return rendered(self.tokenizer, messages, where, add_generation_prompt=asking)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return Encoder(tokenizer, eos=False).encode([text])[0].tolist() if text else []
