"""What the console says, in a terminal and outside one."""

from unmask.tracking import Start, trackers
from unmask.tracking.console import ConsoleTracker, status

RECORD = {
    "kind": "step",
    "step": 3,
    "steps": 10,
    "loss": 2.34567,
    "nll": 1.98766,
    "tokens_per_second": 12345.6,
    "mfu": 0.614,
    "memory": 3 * 2**29,
}


def run(tmp_path, mode, records):
    tracker = ConsoleTracker()
    tracker.start(Start(tmp_path, 2, 10, {"log": {"console": mode}}))
    for record in records:
        tracker.log(record)
    tracker.message("a sentence with [brackets]")
    tracker.close()


def test_status_has_the_numbers():
    assert status(RECORD) == "nll 1.9877  12,346 tokens/s  MFU 61 %  memory 1.50 GB"
    assert "MFU" not in status({**RECORD, "mfu": None})
    assert status({**RECORD, "skipped": True}).endswith("update skipped")


def test_outside_a_terminal_every_record_is_a_line(tmp_path, capsys):
    evaluation = {"kind": "evaluation", "step": 3, "steps": 10, "nats_per_token": 2.0, "standard_error": 0.125}
    run(tmp_path, "auto", [RECORD, evaluation])
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("step 3/10  nll 1.9877  12,346 tokens/s  MFU 61 %  memory 1.50 GB  ETA ")
    assert lines[1] == "step 3: validation 2.0000 +- 0.1250 nats per token"
    assert lines[2] == "a sentence with [brackets]"


def test_one_chunk_has_no_standard_error_to_print(tmp_path, capsys):
    alone = {"kind": "evaluation", "step": 3, "steps": 10, "nats_per_token": 2.0, "standard_error": float("nan")}
    run(tmp_path, "plain", [alone])
    assert capsys.readouterr().err.splitlines()[0] == "step 3: validation 2.0000 nats per token"


def test_live_display_shows_progress_and_eta(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    run(tmp_path, "rich", [RECORD])
    err = capsys.readouterr().err
    assert "3/10" in err and "nll 1.9877" in err and "ETA" in err and "a sentence with [brackets]" in err


def test_none_is_silent(tmp_path, capsys):
    run(tmp_path, "none", [RECORD])
    assert capsys.readouterr() == ("", "")


def test_trackers_are_found_by_name():
    assert trackers["console"] is ConsoleTracker
    assert {"console", "jsonl"} <= set(trackers.names())


def test_a_run_without_an_end_has_an_eta():
    tracker = ConsoleTracker()
    tracker._first, tracker._began = 0, 0.0
    assert tracker._eta({"step": 1, "steps": 10**300}).days > 300_000
