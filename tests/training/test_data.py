"""What a run does with its data before the first step: ids that fit, files that are what they were, labels that are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.training.tiny import MODEL, config, documents, train
from unmask.data import dataset_from
from unmask.errors import UserError
from unmask.training import setup


def words(path: Path, ids: dict[str, int], **special: Any) -> str:
    """A tokeniser of whole words in a folder."""
    backend = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(path)
    return str(path)


def test_a_tokenizer_with_gaps_sizes_the_model_by_its_largest_id(tmp_path):
    """32 tokens, the end token's id is 40; counted, the model had 32 rows and the mask token was the end token."""
    gaps = words(tmp_path / "words", {**{f"w{i}": i for i in range(31)}, "<eos>": 40}, eos_token="<eos>")
    model = {key: value for key, value in MODEL.items() if key != "vocab_size"}
    for name in ("ar", "block_diffusion"):
        tiny = config(tmp_path / "run", f"data.tokenizer={gaps}", objective={"name": name})
        tiny.model.config, tiny.model.mask_token_id = model, None
        run = setup.prepare(tiny, ["w1 w2 w3 w30"] * 3)
        assert run.objective.mask_token_id == 41 and run.tokenizer.eos_token_id == 40
        assert run.model.get_input_embeddings().weight.shape[0] == 42


def test_a_tokenizer_larger_than_the_model_trains_on_data_that_fit(tmp_path):
    """As Gemma 3's own has a token for images that its text models have no row for."""
    larger = words(tmp_path / "words", {f"w{i}": i for i in range(70)}, eos_token="w1")
    tiny = config(tmp_path / "run", f"data.tokenizer={larger}")
    assert len(setup.prepare(tiny, ["w2 w3"] * 3, ["w2"]).packs)
    with pytest.raises(UserError, match="data.train=list: document 1 holds the token id 64 and the model has 64 emb"):
        setup.prepare(tiny, ["w2 w3", "w2 w64"])
    with pytest.raises(UserError, match="data.validation: document 0 holds the token id 66 and the model has 64 emb"):
        setup.prepare(tiny, ["w2 w3"] * 3, ["w66"])
