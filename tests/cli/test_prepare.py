"""`unmask prepare`: its options reach the reading, its figures come out as JSON or as a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unmask import cli
from unmask.cli.prepare import Read
from unmask.data import Reading, open_dataset, train_tokenizer
from unmask.errors import UserError


def unmask(*arguments: Any) -> tuple[str, str]:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout, result.stderr


def test_figures_as_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "a": "two"}\n{"q": 3}\n{"q": "four", "a": "five"}\n')
    train_tokenizer(["one two", "four five"], 300, tmp_path / "bpe")
    options = [
        "--tokenizer",
        tmp_path / "bpe",
        "--field",
        "prompt=q",
        "--field",
        "response=a",
        "--skip-bad",
        "--no-eos",
    ]
    out, err = unmask("prepare", tmp_path / "a.jsonl", tmp_path / "out", *options, "--json")
    figures, dataset = json.loads(out), open_dataset(tmp_path / "out")
    assert dataset.manifest is not None
    assert figures.pop("path") == str(tmp_path / "out") and 0 < figures.pop("seconds") < 60
    assert figures == dataset.manifest.model_dump(exclude={"files"})
    assert figures["documents"] == len(dataset) == 2 and figures["skipped"] == 1
    supervised = sum(int(dataset.document(index)[1].sum()) for index in range(2))
    assert figures["supervised"] == supervised < figures["tokens"] == dataset.tokens
    assert err == f'unmask: skipped {tmp_path / "a.jsonl"}:2: needs "q" and "a"; it has q\n'
    out, _ = unmask("prepare", tmp_path / "a.jsonl", tmp_path / "out", *options, "--force")
    partly = f"{dataset.tokens} tokens ({supervised} of them supervised)"
    assert out == f"{tmp_path / 'out'}: 2 documents, {partly}, skipped 1 bad\n"


def test_every_setting_of_the_reading_is_an_option(tmp_path: Path) -> None:
    own = set(Read.__dataclass_fields__)
    assert own == set(Reading.model_fields) - {"fields"} | {"field"}
    for name in own - {"field", "bos"}:  # a list for a mapping; neither --bos nor --no-bos is `auto`
        assert Read.__dataclass_fields__[name].default == Reading.model_fields[name].default
    (tmp_path / "a.bin").write_bytes(bytes([3, 4, 0, 5, 0]))
    out, _ = unmask("prepare", tmp_path / "a.bin", tmp_path / "out", "--dtype", "uint8", "--end-id", 0)
    assert out == f"{tmp_path / 'out'}: 2 documents, 5 tokens\n"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--field", "text"], "--field 'text' is not of the form NAME=COLUMN, such as text=content"),
        (["--field", "txet=a"], r"prepare: fields: 'txet' is no field of a record \(did you mean 'text'\?\)"),
        (["--supervise", "first"], "prepare: supervise='first': input should be 'all' or 'last'"),
        (["--split", "train"], "split=train has no effect"),
        (["--tokenizer", "t", "--train-tokenizer", "300"], "give --tokenizer .* or --train-tokenizer"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: list[str], sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}\n')
    with pytest.raises(UserError, match=sentence):
        unmask("prepare", tmp_path / "a.jsonl", tmp_path / "out", *options)
