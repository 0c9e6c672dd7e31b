"""Where the mask token comes from: asked for, the model's, the tokeniser's, a padded row, a grown one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unmask.errors import UserError
from unmask.models.mask_token import MASK, ensure_mask_token


def model(rows: int = 12, tied: bool = False, **config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, pad_token_id=0, **shape, **config))


def tokenizer(words: int = 10, mask: int | None = None) -> Any:
    """A tokeniser of `words` words w0, w1, ..., of which one may be its mask token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(words)}
    options = {} if mask is None else {"mask_token": f"w{mask}"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")), **options)


def rows_of(made: Any) -> tuple[int, int]:
    return made.get_input_embeddings().weight.shape[0], made.get_output_embeddings().weight.shape[0]


def test_what_was_asked_for_comes_first() -> None:
    made, words = model(mask_token_id=2), tokenizer(mask=4)
    assert ensure_mask_token(made, words, 7) == made.config.mask_token_id == 7
    assert rows_of(made) == (12, 12)
    assert words.mask_token_id == 4, "the tokeniser's own mask token is left alone"


def test_the_models_own_before_the_tokenizers() -> None:
    assert ensure_mask_token(model(mask_token_id=2), tokenizer(mask=4)) == 2
    assert ensure_mask_token(model(mask_token_id=0), None) == 0
    made = model()
    assert ensure_mask_token(made, tokenizer(mask=4)) == made.config.mask_token_id == 4
    assert rows_of(made) == (12, 12)


def test_a_padded_row_is_reused_as_qwen_has_them() -> None:
    """12 embeddings, 10 words: id 10 is free, nothing grows, and the tokeniser learns the name."""
    made, words = model(), tokenizer()
    before = made.get_input_embeddings().weight.detach().clone()
    assert ensure_mask_token(made, words) == words.mask_token_id == 10
    assert words.mask_token == MASK and len(words) == 11
    assert torch.equal(made.get_input_embeddings().weight, before)


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_grows_as_llamas_must(tied: bool) -> None:
    """A new row, the mean of the old ones, in the embedding and in the head; the old rows stay."""
    made, words = model(rows=10, tied=tied), tokenizer()
    embedding, head = (x.weight.detach().clone() for x in (made.get_input_embeddings(), made.get_output_embeddings()))
    assert ensure_mask_token(made, words) == words.mask_token_id == made.config.mask_token_id == 10
    assert rows_of(made) == (11, 11) and made.config.vocab_size == 11
    new_embedding, new_head = made.get_input_embeddings().weight, made.get_output_embeddings().weight
    assert (new_embedding is new_head) == tied
    for new, old in ((new_embedding, embedding), (new_head, head)):
        assert torch.equal(new[:10], old)
        torch.testing.assert_close(new[10], old.mean(0))
        assert new.requires_grad
    logits = made(input_ids=torch.tensor([[10]])).logits
    assert logits.shape == (1, 1, 11) and logits.isfinite().all()


def test_without_a_tokenizer_the_next_row_is_new() -> None:
    made = model()
    assert ensure_mask_token(made, None) == 12
    assert rows_of(made) == (13, 13)


def test_a_tokenizer_larger_than_the_embedding_gets_the_next_row() -> None:
    """Tokenisers may hold added words that the model has no row for."""
    made = model(rows=8)
    assert ensure_mask_token(made, tokenizer(10)) == 8
    assert rows_of(made) == (9, 9)


def test_an_id_in_the_middle_names_its_word() -> None:
    words = tokenizer()
    assert ensure_mask_token(model(), words, 6) == words.mask_token_id == 6
    assert words.mask_token == "w6"


def with_gap(ids: dict[str, int], **special: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(ids, unk_token="w0")), **special)


def test_the_largest_id_counts_and_not_the_number_of_tokens() -> None:
    """As cl100k has gaps. One before the end token made that the mask token."""
    words = with_gap({**{f"w{i}": i for i in range(8)}, "<eos>": 9}, eos_token="<eos>")
    assert len(words) == words.eos_token_id == 9
    assert ensure_mask_token(model(), words) == words.mask_token_id == 10 and words.eos_token_id == 9
    made, words = model(rows=10), with_gap({**{f"w{i}": i for i in range(8)}, "<eos>": 9}, eos_token="<eos>")
    assert ensure_mask_token(made, words) == 10 and rows_of(made) == (11, 11)


def test_a_name_that_would_get_another_tokens_id_is_not_given() -> None:
    """The library numbers a new token by the count of the others, whether or not that id is taken."""
    words = with_gap({f"w{i}": 2 * i for i in range(5)})
    assert ensure_mask_token(model(), words) == 9
    assert words.mask_token is None and words.convert_ids_to_tokens(8) == "w4" and len(words) == 5


def test_of_a_larger_tokenizer_no_token_with_a_role_is_taken() -> None:
    made, words = model(rows=8), with_gap({**{f"w{i}": i for i in range(8)}, "<eos>": 8, "w9": 9}, eos_token="<eos>")
    assert ensure_mask_token(made, words) == 9 and words.eos_token_id == 8


@pytest.mark.parametrize("wrong", [-1, 13, 1000])
def test_an_id_out_of_range_is_refused(wrong: int) -> None:
    sentence = rf"mask token id {wrong} does not fit the model's 12 embeddings \(model.mask_token_id\)"
    with pytest.raises(UserError, match=sentence):
        ensure_mask_token(model(), None, wrong)
    assert ensure_mask_token(model(), None, 12) == 12, "one past the end grows the embedding"
