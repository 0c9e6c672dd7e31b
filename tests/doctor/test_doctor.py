"""The doctor: its facts against the machine's own, what is broken, and what is only missing."""

import json
import os
import platform
import shutil
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unmask import doctor
from unmask.cli import app, say
from unmask.doctor import machine, packages, trial


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path_factory.mktemp("runs")), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_facts_are_the_machines(facts):
    import torch

    assert facts["python"]["version"] == platform.python_version()
    assert facts["packages"]["torch"] == version("torch") and facts["packages"]["numpy"] == version("numpy")
    assert facts["cpu"]["cores"] == os.cpu_count() and facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["distributed"]["gloo"] == torch.distributed.is_gloo_available()
    assert facts["tools"]["ip"]["path"] == shutil.which("ip")
    assert facts["devices"]["used"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert "tiles" in facts["devices"]["attention"]
    assert facts["trial"]["ok"] and facts["trial"]["last_loss"] < facts["trial"]["first_loss"]
    assert facts["problems"] == []


def test_figures_are_plausible(facts):
    assert 0.1 < facts["cpu"]["gflops"]["float32"] < 1e6
    assert facts["disk"]["write_mb_per_second"] > 1 and facts["disk"]["free_gb"] > 0


def test_the_text_has_the_same_sections(facts):
    lines = say.machine(facts).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(facts)
    assert any(version("torch") in line for line in lines)
    assert any(line.endswith(", for reading models from .gguf files") for line in lines)


def test_what_is_required_and_missing_is_a_problem(monkeypatch, tmp_path):
    real = packages.version
    monkeypatch.setattr(packages, "version", lambda name: {"numpy": None, "rich": "1.0"}.get(name, real(name)))
    facts = doctor.examine(tmp_path)
    assert any(line.startswith("numpy is not installed: pip install 'numpy") for line in facts["problems"])
    assert any(line.startswith("rich 1.0 is too old: pip install 'rich") for line in facts["problems"])
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1 and "numpy is not installed" in result.stdout


def test_what_is_optional_and_missing_is_advice():
    facts = {
        "extras": {"wandb": {"version": None, "for": "logging to it"}, "gguf": {"version": "1", "for": "reading it"}},
        "tools": {"ip": {"path": None, "package": "iproute2", "for": "measuring"}},
    }
    assert doctor._missing(facts) == ["pip install 'unmask[wandb]' for logging to it", "install iproute2 for measuring"]


def test_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(packages.EXTRAS) <= set(project["optional-dependencies"])


def test_a_step_that_fails_is_told(monkeypatch):
    def broken():
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(trial, "_trained", broken)
    facts, problems = trial.attempt()
    assert facts == {"ok": False}
    assert problems == ["a training step and a sample failed: RuntimeError: no kernel image is available"]


def test_a_folder_that_takes_no_file_is_a_problem(tmp_path):
    facts, problems = machine.disk(tmp_path / "missing")
    assert "write_mb_per_second" not in facts
    assert problems == [
        f"{tmp_path / 'missing'}: cannot be written: No such file or directory; runs need a folder that can"
    ]
