"""What the benchmarks share: each figure is printed when it is measured, so that a stop loses none."""

import ast
import json
import sys
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import Figure, report, run_cases

FOLDER = Path(common.__file__).parent
#: Without a command line of their own.
PARTS = {"common.py", "ranks.py", "links.py", "block_worker.py"}
GOOD, BAD = Figure("good", 2.5, 2.0, ">="), Figure("bad", 2.5, 2.0, "<=")


def test_a_figure_is_printed_before_the_next_is_measured(capsys):
    seen = []

    def measured():
        for figure in (GOOD, BAD):
            yield figure
            seen.append(capsys.readouterr().out)

    assert report(measured(), as_json=True) == 1
    assert [json.loads(each) for each in seen] == [
        {"figure": "good", "value": 2.5, "goal": 2.0, "sense": ">=", "holds": True},
        {"figure": "bad", "value": 2.5, "goal": 2.0, "sense": "<=", "holds": False},
    ]
    seen.clear()
    report(measured(), as_json=False)
    assert [each.split() for each in seen] == [
        ["2.500", ">=", "2", "ok", "good"],
        ["2.500", "<=", "2", "MISSED", "bad"],
    ]
    assert report([GOOD], as_json=False) == 0


def test_ctrl_c_leaves_what_was_measured(capsys, monkeypatch):
    def stopped(rounds):
        yield Figure(f"{rounds} rounds", 1.0, 0.0, ">=")
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["bench", "--json", "--rounds", "3"])
    cases = {"first": lambda rounds: [GOOD, BAD], "second": stopped, "third": lambda rounds: pytest.fail("goes on")}
    assert run_cases("text", cases, 5, "rounds") == 130
    out, err = capsys.readouterr()
    assert [json.loads(line)["figure"] for line in out.splitlines()] == ["good", "bad", "3 rounds"]
    assert err.splitlines()[-1] == "stopped: the lines above are what was measured" and "third" not in err


def test_cases_can_be_chosen(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "second"])
    assert run_cases("text", {"first": lambda rounds: [BAD], "second": lambda rounds: [GOOD]}, 5, "rounds") == 0
    assert "good" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted(set(FOLDER.glob("*.py")) - {FOLDER / name for name in PARTS}), ids=lambda path: path.name
)
def test_benchmarks_print_by_these_functions_alone(path):
    """Figures that are collected in a list reach `report` when all are there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {name: [] for name in ("report", "shown", "run_cases")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
            calls[node.func.id].append(node)
    assert sum(map(len, calls.values())) == 1
    generators = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    }
    for call in calls["report"]:
        assert isinstance(call.args[0], ast.Call) and ast.unparse(call.args[0].func) in generators | {"bubbles"}
