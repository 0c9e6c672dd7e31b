"""What a run says before its first step: what it is, what has changed, how long it takes."""

import json

import pytest

from tests.training.tiny import config, documents, train
from unmask.planning.dry_run import plan
from unmask.training import opening


def test_the_header_and_what_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(opening, "peak_flops", lambda device, dtype: 1e6)
    first = train(tmp_path, "log.console=plain")
    said = capsys.readouterr().err.splitlines()
    size = sum(parameter.numel() for parameter in first.run.model.parameters())
    assert said[0] == f"qwen3, {size:,} parameters, block_diffusion, on cpu"
    assert said[1].endswith(f": 40 documents, {sum(len(each['input_ids']) for each in documents()):,} tokens")
    assert said[2].startswith(f"{tmp_path}: 4 of 4 steps of ") and ", about " in said[2]
    train(tmp_path, "log.console=plain", "training.steps=6", "optimizer.learning_rate=0.001")
    said = capsys.readouterr().err.splitlines()
    assert said[2].startswith(f"{tmp_path}: 2 of 6 steps of ")
    assert said[3] == f"resuming from {tmp_path / 'step-00000004'}"
    assert said[4] == "changed since: optimizer.learning_rate 0.003 -> 0.001, training.steps 4 -> 6"


def test_a_run_without_changes_says_none(tmp_path, capsys):
    train(tmp_path, "training.steps=1")
    train(tmp_path, "training.steps=1", "log.console=plain", "log.every=2")
    assert "changed since" not in capsys.readouterr().err


def test_the_time_is_work_over_a_share_of_the_rate_and_then_the_pace_of_the_log(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents()))
    monkeypatch.setattr(opening, "peak_flops", lambda device, dtype: 1e9)
    facts = plan(config(tmp_path / "run", f"data.train={data}"))
    bounds = [4 * facts["flops_first_step"] / (share * 1e9) for share in (0.7, 0.3)]
    assert facts["seconds_predicted"] == pytest.approx(bounds, abs=0.06)

    run = train(tmp_path / "run", data=str(data)).run
    log = tmp_path / "run" / "log.jsonl"
    records = [json.loads(line) | {"tokens_per_second": 50.0} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokens = sum(len(document) for pack in run.source.documents(1) for document in pack)
    assert opening.predicted(run, [], 1, 1) == pytest.approx((3 * tokens / 50, 3 * tokens / 50))
    log.unlink()
    assert opening.predicted(run, [], 1, 2) is None
    monkeypatch.setattr(opening, "peak_flops", lambda device, dtype: None)
    assert opening.predicted(run, [], 1, 1) is None
