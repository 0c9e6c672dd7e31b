"""Training on several sources: the dry run, the log, an exact resume, and what another mixture is refused for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.tiny import config, documents, log, losses, stop_at, train, weights
from unmask import Trainer
from unmask.cli import say
from unmask.data import prepare
from unmask.errors import UserError
from unmask.planning.dry_run import plan


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, object]]:
    """One of 40 documents prepared, one of 15 as JSONL."""
    for name, count in (("a", 40), ("b", 15)):
        lines = [json.dumps(record) for record in documents(count, seed=count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "a.jsonl", tmp_path / "a", None)
    return [{"path": str(tmp_path / "a"), "weight": 1}, {"path": str(tmp_path / "b.jsonl"), "weight": 3}]


def test_shares_in_the_dry_run_and_in_the_log(tmp_path: Path, sources: list[dict[str, object]]) -> None:
    settings = config(tmp_path / "run", "training.steps=16", "training.batch_size=4")
    trainer = Trainer(config=settings)
    trainer.train(sources)
    facts = plan(trainer.config)
    assert facts["sources"] == [source["path"] for source in sources]
    assert facts["source_share"] == pytest.approx([0.25, 0.75], abs=0.02)
    assert facts["source_passes"][1] > 3 > 1 > facts["source_passes"][0]
    assert sum(facts["source_tokens"]) == facts["tokens"] and facts["documents"] == 55
    assert str(sources[1]["path"]) in say.plan(facts)
    steps = [record for record in log(tmp_path / "run") if record["kind"] == "step"]
    assert all(sum(record["source_tokens"]) == record["tokens"] for record in steps)
    seen = [sum(record["source_tokens"][number] for record in steps) for number in (0, 1)]
    assert seen[1] / sum(seen) == pytest.approx(0.75, abs=0.03)
    # The config that the run has written names the sources, and makes the same run.
    again = Trainer(config=type(settings).load(tmp_path / "run" / "config.yaml", [f"checkpoint.path={tmp_path}/again"]))
    again.train()
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_a_resumed_mixture_is_the_uninterrupted_one(tmp_path: Path, sources: list[dict[str, object]]) -> None:
    options = ["training.steps=6", "training.batch_size=3"]
    whole = train(tmp_path / "whole", *options, data=sources)
    train(tmp_path / "parts", *options, data=sources, callbacks=[stop_at(3)])
    parts = train(tmp_path / "parts", *options, data=sources)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, weight in weights(whole).items():
        assert weight.equal(weights(parts)[name])
    for other in ([{**sources[0], "weight": 2}, sources[1]], [sources[1], sources[0]], [sources[0]]):
        with pytest.raises(UserError, match="cannot be continued exactly: data.train is not what it was"):
            train(tmp_path / "parts", *options, "training.steps=8", data=other)
    with pytest.raises(UserError, match="data.long_documents=drop, but it was cut"):
        train(tmp_path / "parts", *options, "data.long_documents=drop", data=sources)


def test_paths_in_a_list_are_sources_and_strings_texts(tmp_path: Path, sources: list[dict[str, object]]) -> None:
    paths = [Path(str(source["path"])) for source in sources]
    trainer = train(tmp_path / "run", "training.steps=null", data=paths)
    assert [source.weight for source in trainer.run.source.mixture.sources] == [None, None]
    packs = sum(len(source.packs) for source in trainer.run.source.mixture.sources)
    assert trainer.summary.steps == -(-packs // 2)  # one pass over both
    with pytest.raises(UserError, match="text needs a tokeniser"):
        train(tmp_path / "texts", data=[str(path) for path in paths])


@pytest.mark.parametrize(
    "train_data, sentence",
    [
        ([{"path": "none", "weight": 1}], "data.train=none: no such dataset, file or folder"),
        ([{"path": "none", "weight": 0}], "data.train: item 0: weight=0: input should be greater than 0"),
        ([{"path": "none", "weigth": 1}], "record 0: needs .*; it has path, weigth"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, train_data: list[dict[str, object]], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", data=train_data)


def test_a_config_names_sources_with_and_without_weights(tmp_path: Path, sources: list[dict[str, object]]) -> None:
    first, second = sources
    settings = config(tmp_path / "run", f"data.train=[{first['path']}, {{path: {second['path']}, weight: 2}}]")
    with pytest.raises(UserError, match=f"data.train={first['path']} has no weight, and others have"):
        Trainer(config=settings).train()
    with pytest.raises(UserError, match="data.train: the list of sources is empty"):
        config(tmp_path / "run", "data.train=[]")
    with pytest.raises(UserError, match="data.train: item 0: unknown key 'wieght' .did you mean 'weight'"):
        config(tmp_path / "run", "data.train=[{path: a, wieght: 1}]")


def test_long_documents(tmp_path: Path) -> None:
    data = [*documents(10), {"input_ids": list(range(60)) * 4}]
    said: list[str] = []
    settings = config(tmp_path / "run", "data.long_documents=drop", "training.steps=1")
    trainer = Trainer(config=settings)
    trainer.message = said.append  # type: ignore[method-assign]
    trainer.train(data)
    assert said == ["data.train=list: 1 of 11 documents are longer than data.pack_tokens=128 and left out"]
    assert trainer.run.source.mixture.dropped == 1
    with pytest.raises(UserError, match="data.train=list: document 10 has 240 tokens: a pack holds 128; raise"):
        train(tmp_path / "other", "data.long_documents=refuse", data=data)


def test_evaluation_settings_without_data_are_told(tmp_path: Path) -> None:
    """And not refused: `data.validation=null` is how a recipe's evaluation is turned off."""
    trainer = train(tmp_path, "training.steps=1", "evaluation.draws=3")
    assert trainer.run.notes() == ["evaluation.draws=3 has no effect: data.validation is empty"]
