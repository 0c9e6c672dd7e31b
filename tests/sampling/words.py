"""A tokeniser of one word a token, small enough for the tiny model of `reference`."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, TURN_END = 36, 37
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m.role }} {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """w0 to w30, the roles, ?, <unk> and four special tokens."""
    names = [*(f"w{i}" for i in range(31)), "system", "user", "assistant", "?", "<unk>"]
    vocabulary = {name: place for place, name in enumerate([*names, "<|start|>", "<|end|>", "<|eos|>", "<|mask|>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|eos|>", mask_token="<|mask|>",
        extra_special_tokens=["<|start|>", "<|end|>"], chat_template=TEMPLATE,
    )  # fmt: skip
