"""The demo, and every verb it names at its end, as a stranger would run them; tiny, but otherwise the real thing."""

from __future__ import annotations

import ast
import io
import json
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from unmask import load
from unmask.cli import main
from unmask.data import load_tokenizer, train_tokenizer
from unmask.demo import Example, Settings, Watch, examples_from, run
from unmask.errors import UserError

SMALL = ["--steps", "3", "--layers", "1", "--files", "6"]


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def unmask(*arguments: str | Path, cwd: Path) -> Result:
    """The command line in this process: a new one takes seconds to import torch."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    program = ["unmask", *map(str, arguments)]
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", program):
        try:
            main()
        except SystemExit as exit:
            code = exit.code or 0
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished small demo; its output is beside it."""
    base = tmp_path_factory.mktemp("demo")
    result = unmask("demo", *SMALL, "--out", "out", cwd=base)
    assert result.returncode == 0, result.stderr
    (base / "said").write_text(result.stdout)
    return base


def test_it_tells_the_whole_story(folder):
    said = (folder / "said").read_text()
    for part in ("Training a tokeniser", "3 steps done", "the original:", "before training", "after training"):
        assert part in said
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step"] * 3 + ["evaluation"]
    assert (folder / "out" / "config.yaml").exists()
    assert (folder / "out" / "step-00000003" / "manifest.json").exists()


def test_run_again_it_takes_up_what_is_there(folder):
    result = unmask("demo", *SMALL, "--out", "out", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "Training a tokeniser" not in result.stdout
    assert "after training" in result.stdout


def test_sample(folder):
    result = unmask("sample", "out", "length=8", "--prompt", "def f(x):", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def f(x):")
    result = unmask(
        *("sample", "out", "length=5", "threshold=1", "--prompt", "for i in ", "--suffix", "    total += i", "--json"),
        cwd=folder,
    )
    facts = json.loads(result.stdout)
    assert len(facts["tokens"]) == 5 and facts["interrupted"] is False


def test_eval(folder):
    arguments = ("eval", "out", "--data", "out/data/held-out", "--packs", "2")
    result = unmask(*arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "nats per token" in result.stdout and "bits per byte" in result.stdout
    facts = json.loads(unmask(*arguments, "--json", cwd=folder).stdout)
    assert 5 < facts["nats_per_token"] < 9
    assert facts["chunks"] >= 2


def test_export(folder):
    from transformers import AutoModelForCausalLM

    result = unmask("export", "out", "hf", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert AutoModelForCausalLM.from_pretrained(folder / "hf").config.unmask["name"] == "block_diffusion"
    again = unmask("export", "out", "hf", cwd=folder)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "unmask: hf: is not empty; name another folder, or overwrite it with --force\n"
    sampled = unmask("sample", "hf", "length=4", "--prompt", "x", cwd=folder)
    assert sampled.returncode == 0, sampled.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["sample", "nowhere"], "unmask: nowhere: no such checkpoint folder\n"),
        (["sample", "out", "tempreture=1"], "unmask: sample: unknown key 'tempreture' (did you mean 'temperature'?)"),
        (["eval", "out", "--data", "nowhere"], "unmask: nowhere: no such dataset, file or folder\n"),
        (["export", "out", "new", "--format", "gguf"], "unmask: unknown format 'gguf'; known: hf\n"),
        (["export", "out", "new", "--dtype", "int3"], "unmask: dtype=int3: "),
        (["demo", "--out", "said"], "unmask: said: exists and is not a demo's folder"),
    ],
)
def test_mistakes_are_one_sentence(folder, arguments, sentence):
    result = unmask(*arguments, cwd=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("keep me")
    with pytest.raises(UserError, match="not a demo's folder"):
        run(Settings(out=tmp_path))


def test_ctrl_c_saves_and_exits(tmp_path):
    program = [sys.executable, "-c", "from unmask.cli import main; main()", "demo", "--out", "out"]
    small = ["--steps", "5000", "--layers", "1", "--files", "6"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*program, *small], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 130, complained
    assert "and saved. To go on:" in said and "Traceback" not in complained
    assert list((tmp_path / "out").glob("step-*/manifest.json"))


def test_holes_are_whole_statements(tmp_path):
    source = tmp_path / "lines.py"
    body = ['"Doc."', "size = w * h + 1", "print(size)", "if w:", "    h = 2", "return size"]
    source.write_text("def area(w, h):\n" + "".join(f"    {line}\n" for line in body))
    train_tokenizer([source.read_text()] * 3, 300, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    [example] = examples_from([source], tokenizer)
    assert tokenizer.decode(example.hole).strip() == "size = w * h + 1"
    whole = tokenizer.decode(example.prefix + example.hole + example.suffix)
    assert ast.dump(ast.parse(whole)) == ast.dump(ast.parse(source.read_text()))


def test_the_live_view_unmasks_a_held_out_function(folder):
    opened = load(folder / "out")
    example = Example("lines.py: area", *(opened.tokenizer.encode(text) for text in ("def f(", "x, y", "):")))
    trainer = SimpleNamespace(steps=9, step=4, run=opened)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Watch(Settings(), console, [example], fixed=True) as watch:
        watch(trainer, {"step": 4, "loss": 5.0, "nll": 4.0, "tokens_per_second": 1234.5})
        said = console.file.getvalue()
    for part in ("step 4, held out: lines.py: area", "def f(", "▒", "masked-token loss 4.00", "1,234 tokens/s"):
        assert part in said


def test_the_length_is_fixed_from_the_pace(monkeypatch):
    """0.5 s a step after three slow ones: five minutes hold 600 steps, less what the live view costs."""

    class Clock:
        now = 100.0

    class Stub:
        steps = 100_000

        def set_steps(self, steps: int) -> None:
            self.steps = steps

    monkeypatch.setattr("unmask.demo.time.monotonic", lambda: Clock.now)
    trainer = Stub()
    with Watch(Settings(minutes=5), Console(quiet=True), [], fixed=False) as watch:
        for step in range(1, 20):
            Clock.now += 2.0 if step <= 3 else 0.5
            watch(trainer, {"step": step, "loss": 5.0})
        fixed = 12 + int(0.92 * (300 - 3 * 2.0 - 9 * 0.5) / 0.5)
        assert trainer.steps == fixed
        for step in range(20, 60):
            Clock.now += 0.55
            watch(trainer, {"step": step, "loss": 5.0})
        assert trainer.steps == fixed
        for step in range(60, 100):
            Clock.now += 2.0
            watch(trainer, {"step": step, "loss": 5.0})
        assert trainer.steps < fixed
