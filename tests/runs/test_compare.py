"""`compare`: figures on hand-made logs, the common point, and logs that are still written to."""

import json

import pytest
import yaml

from unmask.cli.say import comparison, show
from unmask.config import Config
from unmask.errors import UserError
from unmask.runs.compare import compare


def step(number, loss, tokens=100, **more):
    speed = {"tokens_per_second": 50.0, "mfu": 0.5, "memory": 2**30}
    return {"kind": "step", "step": number, "steps": 40, "loss": loss, "tokens": tokens, **speed, **more}


def evaluation(number, bound):
    return {"kind": "evaluation", "step": number, "steps": 40, "nats_per_token": bound, "standard_error": 0.1}


def make(folder, records, **changes):
    folder.mkdir()
    tree = Config().model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        tree[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_figures_of_each_run_and_at_the_common_step(tmp_path):
    records = [step(1, 9.0), step(2, 8.0), evaluation(2, 3.0), step(3, 7.0), step(4, 7.5), evaluation(4, 3.5)]
    long = make(tmp_path / "a", records)
    short = make(tmp_path / "b", [step(1, 5.0, memory=2**31), step(2, 4.0)], optimizer__learning_rate=0.01)
    facts = compare([long, short])
    assert facts["at"] == 2 and facts["by"] == "step"
    first, second = facts["runs"]
    assert (first["step"], first["steps"], first["tokens"], first["seconds"]) == (4, 40, 400, 8.0)
    assert (first["loss"], first["best_loss"], first["best_loss_step"]) == (7.5, 7.0, 3)
    assert (first["validation"], first["best_validation"], first["best_validation_step"]) == (3.5, 3.0, 2)
    assert first["loss_at"] == pytest.approx(8.5) and first["validation_at"] == 3.0
    assert first["mean_loss"] == pytest.approx((9 + 8 + 7 + 7.5) / 4)
    assert second["loss_at"] == pytest.approx(4.5) and second["validation_at"] is None
    assert second["memory"] == 2**31 and second["tokens_per_second"] == 50.0
    assert facts["config"] == {"optimizer.learning_rate": [0.0003, 0.01]}
    text = comparison(facts)
    assert "optimizer.learning_rate" in text and "7.0000 (step 3)" in text and "at step 2" in text
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("tokens ")] == [["400", "200"]]


def test_runs_meet_at_equal_tokens(tmp_path):
    wide = make(tmp_path / "wide", [step(1, 9.0, 200), step(2, 8.0, 200)])
    narrow = make(tmp_path / "narrow", [step(n, 9.0 - n) for n in range(1, 4)])
    facts = compare([wide, narrow], by="tokens")
    assert facts["at"] == 300
    assert [run["loss_at"] for run in facts["runs"]] == [9.0, pytest.approx(7.0)]
    with pytest.raises(UserError, match="compare runs by step or by tokens"):
        compare([wide], by="time")


def test_a_record_stands_for_the_steps_since_the_one_before(tmp_path):
    run = make(tmp_path / "a", [step(10, 3.0), step(20, 2.0)])
    assert compare([run])["runs"][0]["tokens"] == 2000
    assert compare([run])["runs"][0]["seconds"] == pytest.approx(40.0)


def test_logs_in_progress_repeated_and_damaged(tmp_path):
    run = make(tmp_path / "a", [step(1, 9.0), step(2, 8.0), step(3, 7.0), evaluation(3, 1.0), step(2, 6.0)])
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    figures = compare([run])["runs"][0]
    assert (figures["step"], figures["loss"], figures["validation"]) == (2, 6.0, None)
    empty = make(tmp_path / "new", [])
    facts = compare([run, empty])
    assert facts["at"] is None and facts["runs"][1]["loss"] is None
    assert "new" in comparison(facts)
    (run / "log.jsonl").write_text('{"kind": "step"}\n{"kind": "step", "step": 2}\n')
    with pytest.raises(UserError, match=r"log.jsonl:1: not a record"):
        compare([run])


def test_losses_that_are_not_finite_are_null_in_json(tmp_path, capsys):
    run = make(tmp_path / "a", [step(1, "nan"), step(2, "inf")])
    show(compare([run]), comparison, as_json=True)
    figures = json.loads(capsys.readouterr().out)["runs"][0]
    assert figures["loss"] is None and figures["mean_loss"] is None


def test_a_config_alone_and_what_is_no_run(tmp_path):
    run = make(tmp_path / "a", [step(1, 9.0)])
    (tmp_path / "b.yaml").write_text("training: {seed: 3}\n")
    facts = compare([run, tmp_path / "b.yaml"])
    assert facts["config"] == {"training.seed": [0, 3]} and facts["runs"][1]["step"] is None
    with pytest.raises(UserError, match="missing: no such run or config"):
        compare([run, tmp_path / "missing"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: holds no config.yaml"):
        compare([tmp_path / "folder"])
