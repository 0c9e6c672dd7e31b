"""The JSONL log: one object per line, and what a resumed run drops."""

import json

from unmask.tracking import Start
from unmask.tracking.jsonl import JsonLines


def step(number, **more):
    return {"kind": "step", "step": number, "steps": 9, "loss": 1.0 / number, **more}


def evaluation(number):
    return {"kind": "evaluation", "step": number, "steps": 9, "nats_per_token": 2.0, "standard_error": 0.1}


def write(path, start, records):
    log = JsonLines()
    log.start(Start(path, start, 9))
    for record in records:
        log.log(record)
        # Flushed: another process sees it at once.
        assert json.loads((path / "log.jsonl").read_text().splitlines()[-1])["step"] == record["step"]
    log.close()


def read(path):
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def test_records_are_lines(tmp_path):
    write(tmp_path, 0, [step(1), step(2, skipped=True)])
    assert read(tmp_path) == [step(1), step(2, skipped=True)]


def test_resume_drops_what_will_be_written_again(tmp_path):
    write(tmp_path, 0, [step(1), evaluation(1), step(2), evaluation(2), step(3)])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    write(tmp_path, 2, [evaluation(2), step(3)])
    assert read(tmp_path) == [step(1), evaluation(1), step(2), evaluation(2), step(3)]


def test_a_rollback_drops_the_steps_that_come_again(tmp_path):
    """An evaluation that is made again takes the old one's place; rollbacks stay, unless the run resumes from there."""
    back = [{"kind": "rollback", "step": 2, "steps": 9, "from": number} for number in (4, 5)]
    write(tmp_path, 0, [step(1), step(2), evaluation(2), step(3), back[0], evaluation(2), step(3), back[1], step(3)])
    assert read(tmp_path) == [step(1), step(2), back[0], evaluation(2), back[1], step(3)]
    write(tmp_path, 2, [step(3)])
    assert read(tmp_path) == [step(1), step(2), evaluation(2), step(3)]


def test_infinities_stay_json(tmp_path):
    write(tmp_path, 0, [step(1, grad_norm=float("inf"))])
    assert read(tmp_path)[0]["grad_norm"] == "inf"
