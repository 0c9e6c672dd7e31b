"""Several sets, noise levels, and what `unmask eval` prints."""

from __future__ import annotations

import json
import math
from importlib import import_module

import numpy as np
import pytest
import torch

from tests.evaluation.test_bound import documents, objective
from tests.sampling.reference import EOS, MASK, VOCABULARY, tiny
from tests.sampling.words import START, word_tokenizer
from tests.training.tiny import documents as records
from tests.training.tiny import train
from unmask.cli.say import evaluation
from unmask.data import Packs, Sampler, dataset_from, prepare
from unmask.errors import UserError
from unmask.evaluation import Evaluation, Measured, Share, bound, evaluate, evaluate_sets, measure, named
from unmask.evaluation.bound import ratio
from unmask.models import RowModel
from unmask.objectives import build
from unmask.objectives.clip import scored_blocks
from unmask.runs.open import OpenModel, open_model

PACKS = [documents(34, 10), documents(15, 21, 8)]


def test_levels_of_blocks_of_four_are_quarters():
    """Every bin against the rows themselves."""
    model, _ = tiny(seed=4)
    row_model, chosen = RowModel(model), objective("block_diffusion", block_size=4)
    found = measure(row_model, chosen, PACKS, draws=3)
    noisy = chosen.evaluation().model_copy(update={"draws": 3})
    levels = iter(noisy.levels([document for pack in PACKS for document in pack], 0))
    losses: dict[float, list[tuple[float, float]]] = {}
    for pack in PACKS:
        rows = noisy.rows(pack, 0, [next(levels) for _ in pack])
        with torch.no_grad():
            nll = row_model(row_model.collate(rows), noisy, per_row=True).numpy()
        for number, start in enumerate(rows.blocks()[0]):
            size = rows.blocks()[1][number]
            own = [place for place, row in enumerate(rows.labelled) if start <= row < start + size]
            losses.setdefault(math.ceil(4 * len(own) / size) / 4, []).append((np.mean(nll[own]) * size, size))
    bins = found.by_level(4)
    assert [one.stop for one in bins] == sorted(losses) == [0.25, 0.5, 0.75, 1.0]
    for one in bins:
        nats, sizes = np.array(losses[one.stop]).T
        assert one.blocks == len(sizes)
        assert one.nats_per_token == pytest.approx(nats.sum() / sizes.sum(), abs=1e-12)
        assert one.standard_error == pytest.approx(ratio(nats, sizes).standard_error, abs=1e-12)
    # The levels are spread over all tokens: the bins make up the bound.
    assert sum(one.share for one in bins) == pytest.approx(1)
    whole = sum(one.share * one.nats_per_token for one in bins)
    assert whole == pytest.approx(found.bound.nats_per_token, abs=1e-12)
    assert found.by_level(1)[0].nats_per_token == pytest.approx(whole, abs=1e-12)


def test_a_uniform_model_is_as_bad_at_every_level():
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = measure(RowModel(model), objective("mdlm"), PACKS)
    for one in found.by_level(7):
        assert one.nats_per_token == pytest.approx(math.log(VOCABULARY - 1))
    assert len(measure(RowModel(model), objective("ar"), PACKS).level) == 0


def test_shares_put_together_are_the_whole():
    """Three processes, of which the last has no pack of its own in the second round."""
    model, _ = tiny(seed=4)
    row_model, chosen = RowModel(model), objective("block_diffusion", block_size=4)
    packs = [documents(9), documents(12, 5), documents(30), documents(7), documents(3)]
    whole = measure(row_model, chosen, packs, seed=2)
    given, reports = [], []
    for index in range(3):
        with pytest.raises(KeyError):  # what the others give is missing here
            share = Share(index, 3, lambda mine: given.append(mine) or [mine])
            measure(row_model, chosen, packs, seed=2, share=share, report=lambda *seen: reports.append(seen))
    assert [sorted(mine) for mine in given] == [[0, 3], [1, 4], [2, 4]]
    assert reports == [(3, 5), (5, 5)] * 3
    together = measure(row_model, chosen, packs, seed=2, share=Share(1, 3, lambda mine: given))
    assert together.bound == whole.bound == bound(row_model, chosen, packs, seed=2)
    for ours, theirs in zip(together[1:], whole[1:], strict=True):
        assert np.array_equal(ours, theirs)


def test_blocks_without_noise_have_no_level():
    rows = objective("fast_dllm_v2", block_size=4).evaluation().rows(documents(9), 0)
    level, _, size = scored_blocks(rows, np.ones(len(rows.labelled)))
    assert size.tolist() == [3, 3] and (level <= 1).all()  # the first tokens of blocks come from clean rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    train(folder / "run", "training.steps=1")
    for name, count in (("first", 30), ("second", 9)):
        lines = (json.dumps(record) + "\n" for record in records(count, seed=count))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def test_sets_are_what_each_is_alone(run):
    sets = {name: str(run / f"{name}.jsonl") for name in ("first", "second")}
    reports = []
    options = {"packs": 3, "pack_tokens": 64, "seed": 1}
    found = evaluate_sets(run / "run", sets, report=lambda *seen: reports.append(seen), **options)
    assert reports == [(done, 6) for done in range(1, 7)]
    for name, path in sets.items():
        assert found[name].bound == evaluate(run / "run", path, **options).bound
    lines = evaluation(found["first"].asdict(levels=2)).splitlines()
    assert "nats per masked token" in lines[1] and "0.50 to 1.00" in lines[3] and len(lines) == 4


def test_the_next_token_likelihood_is_that_of_the_model_as_an_autoregressive_one(run):
    sets = {name: str(run / f"{name}.jsonl") for name in ("first", "second")}
    reports = []
    found = evaluate_sets(
        run / "run", sets, packs=2, pack_tokens=64, ar=True, report=lambda *seen: reports.append(seen)
    )
    assert reports == [(done, 8) for done in range(1, 9)]
    opened = open_model(run / "run")
    packs = Packs(dataset_from(sets["second"], None), 64)
    wanted = bound(RowModel(opened.model), build("ar"), Sampler(packs, 2, 0).batch(0))
    assert found["second"].ar.bound == wanted != found["second"].bound
    assert found["second"].asdict()["ar"]["nats_per_token"] == wanted.nats_per_token
    assert f"next token: {wanted.nats_per_token:.4f}" in evaluation(found["second"].asdict())
    assert found["first"].bound == evaluate(run / "run", sets["first"], packs=2, pack_tokens=64).bound


def test_bits_are_over_the_bytes_of_what_each_likelihood_scores(monkeypatch):
    """The next-token likelihood of a model of whole sequences does not score position 0; the bound does."""
    model, _ = tiny(seed=4)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    texts = ["w1 w2 w3 w4", "w5 w6 w7"]

    opened = OpenModel(model, word_tokenizer(), MASK, objective("mdlm"))
    monkeypatch.setattr(import_module("unmask.evaluation.evaluate"), "open_model", lambda path, **options: opened)
    found = evaluate("run", [{"text": text} for text in texts], ar=True)
    bits = {"bound": math.log2(VOCABULARY - 1), "ar": math.log2(VOCABULARY)}
    # The end token has no text; a word is two bytes, and a space is one.
    assert found.bits_per_byte == pytest.approx(bits["bound"] * 9 / sum(map(len, texts)))
    assert found.ar.bits_per_byte == pytest.approx(bits["ar"] * 7 / sum(len(text) - 3 for text in texts))


def test_texts_are_measured_after_the_tokenizers_beginning_token(monkeypatch, tmp_path, capsys):
    """It is context and no target; data that were prepared without it are told."""
    model, _ = tiny(seed=4)
    bare, begins = word_tokenizer(), word_tokenizer()
    begins.bos_token, begins.add_bos_token = "<|start|>", True
    opened = OpenModel(model, begins, MASK, objective("mdlm"))
    monkeypatch.setattr(import_module("unmask.evaluation.evaluate"), "open_model", lambda path, **options: opened)
    found = evaluate("run", [{"text": "w1 w2 w3"}], ar=True)
    same = evaluate("run", [{"input_ids": [START, 1, 2, 3, EOS], "loss_mask": [0, 1, 1, 1, 1]}], ar=True)
    assert found.bound == same.bound and found.ar.bound == same.ar.bound and found.ar.bound.tokens == 4
    assert capsys.readouterr().err == ""
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2 w3"}')
    prepare(tmp_path / "a.jsonl", tmp_path / "data", bare)
    evaluate("run", str(tmp_path / "data"))
    assert "its documents do not begin as the model's texts do (bos: <|start|>)" in capsys.readouterr().err


def test_mistakes_name_their_set(run):
    with pytest.raises(UserError, match="missing: no such dataset"):
        evaluate_sets(run / "run", {"a": str(run / "first.jsonl"), "b": "missing"})
    prompts = [{"input_ids": [1, 2], "loss_mask": [0, 0]}]
    (run / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    with pytest.raises(UserError, match="prompts.jsonl: holds no token to learn from"):
        evaluate_sets(run / "run", {"b": str(run / "prompts.jsonl")})


def test_documents_longer_than_the_positions_of_the_model(tmp_path):
    train(tmp_path / "run", "training.steps=1", "data.pack_tokens=16", model={"max_position_embeddings": 16})
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"input_ids": list(range(17))}) + "\n")
    sentence = "a.jsonl: a document .*has 17 tokens, and the model 16 positions .*: set --pack-tokens .* to 16 or less"
    with pytest.raises(UserError, match=sentence):
        evaluate(tmp_path / "run", file)
    assert evaluate(tmp_path / "run", file, pack_tokens=16).bound.tokens == 17


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert named(["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
    assert named(["data/x"]) == {"data/x": "data/x"}
    assert named(["a=b"]) == {"a=b": "a=b"}  # a path that is there
    for text, sentence in ((["=x"], "write name=path"), (["a="], "write name=path"), (["a=x", "a=y"], "named twice")):
        with pytest.raises(UserError, match=sentence):
            named(text)


def test_a_bound_is_told_in_a_sentence():
    empty = np.empty(0)
    one = Evaluation(Measured(ratio(np.array([2.0, 4.0]), np.array([2.0, 2.0])), empty, empty, empty), 1.25)
    sentence = "1.5000 +- 0.5000 nats per token, 1.2500 bits per byte (4 tokens in 2 chunks)"
    assert evaluation(one.asdict()) == sentence
    with pytest.raises(UserError, match="an autoregressive model has no noise levels"):
        one.asdict(levels=3)
