"""Several processes give what one gives, in order; a lost one is told, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unmask.data import encoding, prepare
from unmask.data.workers import ordered
from unmask.errors import UserError


def test_the_same_bytes_whatever_the_number_of_processes(
    tmp_path: Path, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "CHARACTERS", 50_000)  # many batches
    records = [{"text": text} for text in texts] + [{"prompt": "a", "response": "b"}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    manifests = [
        prepare(tmp_path / "a.jsonl", tmp_path / str(workers), tokenizer, workers=workers, skip_bad=True)
        for workers in (0, 1, 2)
    ]
    assert manifests[0] == manifests[1] == manifests[2]
    assert (manifests[0].documents, manifests[0].skipped) == (len(texts) + 1, 1)
    for name in ("tokens.bin", "supervised.bin", "offsets.npy"):
        assert len({(tmp_path / workers / name).read_bytes() for workers in ("0", "1", "2")}) == 1


def test_mistakes_found_elsewhere_are_told_here(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match="a.jsonl:2: needs "):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def square(number: int) -> int:
    if number < 0:
        os._exit(9)
    return number * number


def test_order_and_a_bounded_number_ahead() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    results = ordered(square, numbers(), 2)
    assert next(results) == 0
    assert len(taken) == 4  # two for each process
    assert [0, *results] == [number**2 for number in range(20)]
    with pytest.raises(UserError, match="a process that tokenises ended before its work was done"):
        list(ordered(square, [1, -1, 2], 1))


PROGRAM = """
import os, sys, time
from unmask.data.workers import ordered

def pid(_):
    return os.getpid()

if __name__ == "__main__":
    results = ordered(pid, iter(range(10)), 1)
    print(next(results), flush=True)
    time.sleep(60)
"""


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    child = int(program.stdout.readline())
    os.kill(child, 0)
    program.send_signal(signal.SIGKILL)
    program.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child is still there")
