"""What a run does with its data before the first step: ids that fit, files that are what they were, labels that are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.training.tiny import MODEL, config, documents, train
from unmask.data import checksums, dataset_from, open_dataset, prepare
from unmask.errors import UserError
from unmask.planning.dry_run import plan
from unmask.runs.open import open_model
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
    assert len(setup.prepare(tiny, ["w2 w3"] * 3, ["w2"]).source.mixture)
    with pytest.raises(UserError, match="data.train=list: document 1 holds the token id 64 and the model has 64 emb"):
        setup.prepare(tiny, ["w2 w3", "w2 w64"])
    with pytest.raises(UserError, match="data.validation: document 0 holds the token id 66 and the model has 64 emb"):
        setup.prepare(tiny, ["w2 w3"] * 3, ["w66"])


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """40 documents of ids, as every run here has them."""
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, documents())))
    prepare(tmp_path / "ids.jsonl", tmp_path / "prepared", None)
    return tmp_path / "prepared"


def shuffled(folder: Path) -> str:
    token = np.fromfile(folder / "tokens.bin", np.uint32)
    token[100:140] = token[100:140][::-1]
    token.tofile(folder / "tokens.bin")
    return "tokens.bin"


def moved_boundary(folder: Path) -> str:
    offsets = np.load(folder / "offsets.npy")
    offsets[3] += 1
    np.save(folder / "offsets.npy", offsets)
    return "offsets.npy"


@pytest.mark.parametrize("change", [shuffled, moved_boundary])
def test_data_that_changed_between_two_starts_are_refused(tmp_path, prepared, change):
    train(tmp_path / "run", "training.steps=1", data=str(prepared))
    before = (prepared / "tokens.bin").stat().st_mtime_ns
    name = change(prepared)
    os.utime(prepared / name, ns=(before + 10**9, before + 10**9))
    with pytest.raises(UserError, match=f"{name}: altered since it was written"):
        train(tmp_path / "run", "training.steps=2", data=str(prepared))


def test_large_files_are_compared_by_a_sample(tmp_path, prepared, monkeypatch):
    """Of a file that is too large to read at every start, what the manifest says and parts spread over it."""
    monkeypatch.setattr(checksums, "WHOLE", 0)
    monkeypatch.setattr(checksums, "PART", 8)
    monkeypatch.setattr(checksums, "PARTS", 512)
    before = open_dataset(prepared).digest()
    assert open_dataset(prepared).digest() == before
    shuffled(prepared)
    assert open_dataset(prepared).digest() != before


def test_checksums_are_taken_once(tmp_path, monkeypatch):
    file, reads = tmp_path / "file", []
    file.write_bytes(b"one")
    real = checksums.hashlib.file_digest
    monkeypatch.setattr(checksums.hashlib, "file_digest", lambda *given: reads.append(1) or real(*given))
    first = checksums.sha256(file)
    assert checksums.sha256(file) == first and len(reads) == 1
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert checksums.sha256(file) != first and len(reads) == 2


def raw_ids(folder: Path, ids: list[int]) -> str:
    np.save(folder / "raw.npy", np.array(ids, np.int32))
    return str(folder / "raw.npy")


def raw_records(folder: Path, ids: list[int]) -> str:
    return raw(folder, [{"input_ids": ids}])


@pytest.mark.parametrize("write", [raw_ids, raw_records])
def test_raw_data_that_changed_between_two_starts_are_refused(tmp_path, write):
    train(tmp_path / "run", "training.steps=1", data=write(tmp_path, list(range(60))))
    data = write(tmp_path, [*range(58), 59, 58])
    with pytest.raises(UserError, match="cannot be continued exactly: data.train is not what it was"):
        train(tmp_path / "run", "training.steps=2", data=data)


def test_prompts_longer_than_a_pack_teach_nothing_and_are_told(tmp_path):
    """Answers of 7 tokens after prompts of 300: of five parts one is learnt from, and its prompt begins elsewhere."""
    records = [{"input_ids": [i % 60 for i in range(307)], "loss_mask": [0] * 300 + [1] * 7}] * 6 + documents(2)
    tiny = config(tmp_path / "run", "data.pack_tokens=64", "training.steps=null", "training.batch_size=1")
    tiny.data.train = raw(tmp_path, records)
    facts = plan(tiny)
    assert facts["parts_without_label"] == 24 and facts["cut_answers"] == 6 and "dropped_documents" not in facts
    run = setup.prepare(tiny)
    assert [note.partition(": ")[2].partition("; ")[0] for note in run.notes()] == [
        "parts of documents that hold nothing to learn from, left out: 24",
        "parts of documents longer than data.pack_tokens=64 that are learnt from without the beginning of their "
        "prompt: 6",
    ]
    assert all(any(document.supervised.any() for document in pack) for pack in run.source.mixture)


def raw(folder: Path, records: list[Any]) -> str:
    (folder / "raw.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder / "raw.jsonl")


def test_beginning_tokens_are_as_the_tokenizer_or_the_config_says(tmp_path):
    ids = {"<s>": 0, **{f"w{i}": i + 1 for i in range(20)}, "</s>": 30}
    bare = words(tmp_path / "words", ids, bos_token="<s>", eos_token="</s>")
    for bos, shown, token in (("auto", "none", [3, 30]), ("true", "<s>", [0, 3, 30]), ("false", "none", [3, 30])):
        tiny = config(tmp_path / "run", f"data.tokenizer={bare}", f"data.bos={bos}")
        run = setup.prepare(tiny, ["w2"] * 3)
        assert run.source.mixture.sources[0].packs.dataset.document(0)[0].tolist() == token
        assert (shown == "none") == (run.tokenizer("w2")["input_ids"] == [3])
        tiny.data.train = raw(tmp_path, [{"text": "w2"}] * 3)
        assert plan(tiny)["bos"] == shown
    train(tmp_path / "run", f"data.tokenizer={bare}", "data.bos=true", "training.steps=1", data=["w2"] * 3)
    assert open_model(tmp_path / "run").tokenizer("w2")["input_ids"] == [0, 3], "what it begins prompts with"


def test_data_that_begin_otherwise_than_prompts_are_told(tmp_path):
    ids = {"<s>": 0, **{f"w{i}": i + 1 for i in range(20)}, "</s>": 30}
    bare = words(tmp_path / "words", ids, bos_token="<s>", eos_token="</s>")
    prepare(raw(tmp_path, [{"text": "w2"}] * 3), tmp_path / "data", bare)
    assert setup.prepare(config(tmp_path / "run"), str(tmp_path / "data")).notes() == []
    [note] = setup.prepare(config(tmp_path / "run", "data.bos=true"), str(tmp_path / "data")).notes()
    assert "its documents do not begin as the tokeniser begins prompts (bos: <s>); prepare it again, or set" in note
    assert note.endswith("set data.bos=false")


def test_raw_sources_are_read_as_prepare_reads_them(tmp_path, prepared):
    names = {name: i for i, name in enumerate(["<eos>", *(f"w{i}" for i in range(20)), "ask", "say"])}
    bare = words(tmp_path / "words", names, eos_token="<eos>")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ 'ask ' if m.role == 'user' else 'say ' }}{{ m.content }} <eos> {% endfor %}"
    )
    say = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    data = raw(tmp_path, [{"talk": say * 2}] * 3)
    own = [f"data.tokenizer={bare}", f"data.train={data}", "data.fields={messages: talk}", "data.supervise=last"]
    run = setup.prepare(config(tmp_path / "run", *own, f"data.chat_template={tmp_path / 'chat.jinja'}"))
    token, flags = run.source.mixture.sources[0].packs.dataset.document(0)
    expected = dataset_from(
        [{"messages": say * 2}], bare, supervise="last", chat_template=str(tmp_path / "chat.jinja")
    ).document(0)
    assert token.tolist() == expected[0].tolist() == [21, 2, 0, 22, 3, 0] * 2
    assert flags.tolist() == expected[1].tolist() and flags.sum() == 3
    assert run.tokenizer.chat_template.startswith("{% for m in messages %}")
    with pytest.raises(UserError, match="data.supervise=last has no effect: the data are prepared already"):
        setup.prepare(config(tmp_path / "run", f"data.train={prepared}", "data.supervise=last"))
    with pytest.raises(UserError, match="data: fields: 'txet' is no field of a record"):
        setup.prepare(config(tmp_path / "run", f"data.train={data}", "data.fields={txet: talk}"))
