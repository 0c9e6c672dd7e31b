"""The demo, and every verb it names at its end, as a stranger would run them; tiny, but otherwise the real thing."""

from __future__ import annotations

import ast
import io
import json
import math
import shutil
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from unmask import Config, load
from unmask.cli import main
from unmask.data import dataset_from, load_tokenizer, train_tokenizer
from unmask.demo import Settings, run
from unmask.demo.counts import cross_entropies
from unmask.demo.examples import Example, examples_from
from unmask.demo.watch import Watch
from unmask.errors import UserError
from unmask.models import load as load_model
from unmask.rows import Document
from unmask.runs.folder import saved_steps

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


def test_no_bar_of_transformers_tears_the_view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a terminal, too, where loading shows one elsewhere."""
    from transformers.utils import logging

    from unmask.demo import story

    seen: list[bool] = []
    monkeypatch.setattr(story, "_told", lambda settings, console: seen.append(logging.is_progress_bar_enabled()))
    before = logging.is_progress_bar_enabled()
    run(Settings(out=tmp_path))
    assert seen == [False] and logging.is_progress_bar_enabled() == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished small demo; its output is beside it."""
    base = tmp_path_factory.mktemp("demo")
    result = unmask("demo", *SMALL, "--out", "out", cwd=base)
    assert result.returncode == 0, result.stderr
    (base / "said").write_text(result.stdout)
    return base


def kinds(log: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in log.read_text().splitlines()]


def test_it_tells_the_whole_story(folder):
    said = (folder / "said").read_text()
    parts = ["Training a tokeniser", "1 of 2", "3 steps done", "2 of 2", "3 steps done", "the original:"]
    parts += ["token frequencies", "token pairs", "autoregressive model", "untrained (bound)", "converted (bound)"]
    at = 0
    for part in parts:
        assert part in said[at:], part
        at = said.index(part, at) + len(part)
    for run_ in (folder / "out" / "ar", folder / "out"):
        assert kinds(run_ / "log.jsonl")[:4] == ["step"] * 3 + ["evaluation"]
        assert (run_ / "step-00000003" / "manifest.json").exists()


def test_the_second_run_is_the_first_converted(folder):
    """Its start is the first run's end, to the bit; a step moves it, and its rows still predict the next token."""
    out = folder / "out"
    first, second, config = load(out / "ar"), load(out), Config.load(out / "config.yaml")
    with chdir(folder):
        start = load_model(config.model).model
    for name, weight in first.model.named_parameters():
        assert torch.equal(weight, start.get_parameter(name)), name
        assert not torch.equal(weight, second.model.get_parameter(name)), name
    assert (first.objective.decoding.kind, second.objective.decoding.kind) == ("causal", "block")
    assert first.objective.decoding.shift and second.objective.decoding.shift
    assert second.mask_token_id == first.mask_token_id == second.tokenizer.mask_token_id


def test_run_again_it_goes_straight_to_the_end(folder):
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("step-*/manifest.json")}
    result = unmask("demo", *SMALL, "--out", "out", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "Training a tokeniser" not in result.stdout and "step 1/3" not in result.stdout
    table = result.stdout[result.stdout.index("On held-out files") :]
    assert table == (folder / "said").read_text()[-len(table) :]
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("step-*/manifest.json")}


def test_counts_give_the_cross_entropies_of_a_table_by_hand():
    """Train: 0 1 0 1 | 0 2; held out: 2 0 1 and 1 3, of which the last token is not supervised, nor are firsts."""
    train = dataset_from([{"input_ids": [0, 1, 0, 1]}, {"input_ids": [0, 2]}], None)
    held_out = [
        Document(np.array([2, 0, 1]), np.ones(3, bool), 0),
        Document(np.array([0, 2, 1, 3]), np.array([True, True, True, False]), 1),
    ]
    unigram, bigram = cross_entropies(train, held_out, 4)
    p = {0: 4 / 10, 1: 3 / 10, 2: 2 / 10, 3: 1 / 10}
    scored = [(2, 0), (0, 1), (0, 2), (2, 1)]
    assert unigram.tokens == bigram.tokens == 4
    assert unigram.nats_per_token == pytest.approx(-sum(math.log(p[b]) for _, b in scored) / 4)
    # After 0: 1 twice and 2 once. Nothing was seen after 2.
    after = {(0, 1): (2 - 0.75 + 0.75 * 2 * p[1]) / 3, (0, 2): (1 - 0.75 + 0.75 * 2 * p[2]) / 3}
    expected = -sum(math.log(after.get((a, b), p[b])) for a, b in scored) / 4
    assert bigram.nats_per_token == pytest.approx(expected)
    total = sum(
        math.exp(-cross_entropies(train, [Document(np.array([0, b]), np.ones(2, bool), 0)], 4)[1].nats_per_token)
        for b in range(4)
    )
    assert total == pytest.approx(1)


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
    assert AutoModelForCausalLM.from_pretrained(folder / "hf").config.unmask["name"] == "fast_dllm_v2"
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
        (["export", "out", "new", "--format", "gguf"], "unmask: unknown format 'gguf'; known: family, hf, peft\n"),
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


@pytest.mark.parametrize("second, number, code", [(False, signal.SIGINT, 130), (True, signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_goes_on(folder, tmp_path, second, number, code):
    if second:
        shutil.copytree(folder / "out", tmp_path / "out", ignore=shutil.ignore_patterns("step-00000003", "config.yaml"))
        shutil.copytree(folder / "out" / "ar", tmp_path / "out" / "ar", dirs_exist_ok=True)
    run_ = tmp_path / "out" if second else tmp_path / "out" / "ar"
    command = ["demo", "--out", "out", "--steps", "5000", "--layers", "1", "--files", "6"]
    pipe = subprocess.PIPE
    program = [sys.executable, "-c", "from unmask.cli import main; main()", *command]
    process = subprocess.Popen(program, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "/5000" in line:
            break
    process.send_signal(number)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == code, complained
    assert "and saved. To resume:" in said and "Traceback" not in complained
    [saved] = saved_steps(run_)
    assert 0 < saved < 5000 and second == (saved_steps(tmp_path / "out") != [])

    # Its length is the one it was begun with: cut short here, so that the test ends.
    config = run_ / "config.yaml"
    config.write_text(config.read_text().replace("steps: 5000", f"steps: {saved + 2}"))
    result = unmask(*command[:3], *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{saved + 2} steps done" in result.stdout and "On held-out files" in result.stdout
    assert saved_steps(run_) == [saved, saved + 2]
    steps = [json.loads(line).get("step") for line in (run_ / "log.jsonl").read_text().splitlines()]
    assert steps == [*range(1, saved + 3), saved + 2]


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
    with Watch("masked-token", 60, console, [example], fixed=True) as watch:
        for step in (3, 4):
            watch(trainer, {"step": step, "loss": 5.0, "nll": 4.0, "tokens_per_second": 1234.5})
        said = console.file.getvalue()
    for part in ("step 4, held out: lines.py: area", "def f(", "▒", "masked-token", "loss 4.00", "1,234 tokens/s"):
        assert part in said


class Clock:
    """A trainer whose steps take as long as they are told to."""

    steps = 100_000
    now = 100.0
    step = 0

    def set_steps(self, steps: int) -> None:
        self.steps = steps

    def take(self, watch: Watch, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now, self.step = self.now + seconds, self.step + 1
            watch(self, {"step": self.step, "loss": 5.0})


@pytest.fixture
def trainer(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("unmask.demo.watch.time.monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize("examples, part", [([], 1.0), ([None], 0.92)])
def test_the_length_is_fixed_from_the_pace(trainer, examples, part):
    """0.5 s a step after three slow ones: five minutes hold 600 steps, less what the live view costs."""
    with Watch("", 300, Console(quiet=True, force_terminal=False), examples) as watch:
        trainer.take(watch, 3, 2.0)
        trainer.take(watch, 48, 0.5)
        assert trainer.steps == 100_000
        trainer.take(watch, 9, 0.5)
        fixed = 52 + int(part * (300 - 3 * 2.0 - 49 * 0.5) / 0.5)
        assert trainer.steps == fixed
        trainer.take(watch, 40, 0.55)
        assert trainer.steps == fixed
        trainer.take(watch, 100, 2.0)
        assert trainer.steps < fixed


def test_few_slow_steps_are_enough(trainer):
    """A tenth of 300 s holds fewer than twelve steps; a quarter of it is the longest measurement."""
    with Watch("", 300, Console(quiet=True), []) as watch:
        trainer.take(watch, 3, 20.0)
        trainer.take(watch, 1, 20.0)
        assert trainer.steps == 4 + int((300 - 80) / 20)


def test_the_time_left_is_that_of_both_runs(trainer):
    """Gone on with at step 40 of 100, 0.5 s a step, 200 s to follow."""
    console = Console(file=io.StringIO(), width=120)
    trainer.step, trainer.steps = 40, 100
    with Watch("next-token", 100, console, later=200, fixed=True) as watch:
        trainer.take(watch, 20, 0.5)
    assert "step 50/100  loss 5.00  0 tokens/s  ETA 3:45" in console.file.getvalue()
