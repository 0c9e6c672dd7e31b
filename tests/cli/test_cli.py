"""The command line as a user meets it: exit codes, one-sentence errors, and runs that a signal ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from typing import Annotated

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.training.tiny import MODEL, documents, losses
from unmask import cli
from unmask.errors import UserError
from unmask.runs.folder import saved_steps


@pytest.fixture
def settings(tmp_path):
    """A config file and its data; runs go to `run` beside it."""
    with (tmp_path / "data.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in documents())
    tree = {
        "model": {"config": MODEL, "mask_token_id": 63},
        "data": {"train": str(tmp_path / "data.jsonl"), "pack_tokens": 128},
        "objective": {"name": "block_diffusion", "block_size": 8},
        "training": {"steps": 3},
        "checkpoint": {"path": str(tmp_path / "run")},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def unmask(*arguments):
    """Run in this process, as `main` would: (exit code, stdout, stderr)."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        return 2, result.stdout, f"unmask: {result.exception}\n"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def start(*arguments, **options):
    command = [sys.executable, "-m", "unmask", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_run_from_a_file(settings):
    code, out, err = unmask("train", settings)
    run = settings.parent / "run"
    assert code == 0 and out.startswith("trained 3 steps, loss ") and str(run / "step-00000003") in out
    assert "step 3/3  nll" in err
    code, out, _ = unmask("train", settings, "training.steps=5", "--json")
    facts = json.loads(out)
    assert code == 0 and (facts["step"], facts["interrupted"]) == (5, None)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5]
    assert facts["loss"] == losses(run)[-1][1]
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["steps"] == 5


def test_dry_run_plans_and_writes_nothing(settings):
    before = sorted(settings.parent.rglob("*"))
    code, out, _ = unmask("train", settings, "--dry-run", "--json", "training.steps=null", "training.batch_size=3")
    facts = json.loads(out)
    assert code == 0 and sorted(settings.parent.rglob("*")) == before
    tokens = sum(len(record["input_ids"]) for record in documents())
    assert facts["documents"] == 40 and facts["tokens"] == tokens
    assert facts["fill"] == pytest.approx(tokens / (facts["packs"] * 128), abs=1e-4)
    assert facts["steps"] == -(-facts["packs"] // 3)
    # Embedding (tied); per layer q and o, k and v, the MLP, two norms of the layer, two of the heads; the last norm.
    parameters = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 8) + 32
    assert facts["parameters"] == parameters
    # Buffers too: RoPE's four frequencies, twice.
    assert facts["parameter_bytes"] == 4 * (parameters + 8)
    assert facts["gradient_bytes"] == 4 * parameters and facts["optimizer_bytes"] == 8 * parameters
    parts = ("parameter", "gradient", "optimizer", "average", "activation", "allocator", "process")
    assert facts["peak_bytes"] == sum(facts[f"{part}_bytes"] for part in parts)
    assert facts["rows_first_step"] > facts["tokens_per_step"] > facts["labelled_first_step"] > 0
    assert facts["flops_first_step"] > 6 * (parameters - 64 * 32) * facts["tokens_per_step"]
    code, out, _ = unmask("train", settings, "--dry-run")
    assert code == 0 and f"parameters              {parameters:,}" in out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["training.stepz=3"], "unknown key 'training.stepz' (did you mean 'steps'?)"),
        (["training.steps=-1"], "training.steps=-1: "),
        (["training.steps"], "'training.steps' is not of the form key.path=value, such as training.steps=100"),
        (["objective.name=blok_diffusion"], "unknown objective 'blok_diffusion' (did you mean 'block_diffusion'?)"),
        (["objective.block_size=0"], "block_size"),
        (["objective.blok_size=4"], "unknown key 'blok_size' (did you mean 'block_size'?)"),
        (["data.train=null"], "nothing to train on"),
        (["data.train=missing"], "data.train=missing: no such dataset"),
        (["data.tokenizer=missing"], "missing: no such tokeniser"),
        (["parallel.pipeline_stages=2"], "pipeline_stages=2"),
        (["training.batch_size=3", "training.micro_batch=2"], "must be a multiple of"),
        (["model.name=missing", "model.config=null"], "model.name=missing: no such folder"),
        (["model.config=null"], "give model.name"),
        (["model.config.hiden_size=4"], "'hiden_size'"),
        (["checkpoint.step=7"], "no checkpoint of step 7"),
        (["checkpoint.path="], "checkpoint.path=None: "),
        (["checkpoint.path=''"], "checkpoint.path='': "),
        (["optimizer.learning_rate=.inf"], "optimizer.learning_rate=inf: input should be a finite number"),
        (["training.clip=.nan"], "training.clip=nan: input should be a finite number"),
        (["training.steps=true"], "training.steps: True is no number"),
        (["schedule.warmup=4"], "schedule.warmup=4 is longer than the run, which has 3 steps"),
        (["objective.window=[0.3, 0.8]"], "window=[0.3, 0.8] has no effect here: it needs clip: auto"),
        (["model.skip_last_layer=maybe"], "model.skip_last_layer='maybe': it takes true or false or `auto`"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["train", "dry-run"])
def test_mistakes_are_one_sentence(settings, arguments, sentence, dry):
    code, out, err = unmask("train", settings, *arguments, *dry)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and sentence in err
    assert not (settings.parent / "run").exists()


def test_a_missing_file_is_one_line_from_the_command_itself(tmp_path):
    process = start("train", tmp_path / "missing.yaml")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err == f"unmask: {tmp_path / 'missing.yaml'}: no such config file\n"


def test_a_folder_in_place_of_a_config_file_names_what_is_meant(tmp_path):
    code, out, err = unmask("train", tmp_path)
    assert code == 2 and err == f"unmask: {tmp_path}: is a folder, not a config file: name one\n"
    own = tmp_path / "config.yaml"
    own.write_text("")
    hint = f"name {own}, or use `unmask train --from {tmp_path}` to do its run again"
    code, out, err = unmask("train", tmp_path)
    assert code == 2 and err == f"unmask: {tmp_path}: is a folder, not a config file: {hint}\n"


@pytest.mark.parametrize("minutes", ["inf", "nan"])
def test_a_demo_without_end_is_refused(tmp_path, minutes):
    code, out, err = unmask("demo", "--minutes", minutes, "--out", tmp_path / "demo")
    assert code == 2 and out == "" and "--minutes" in err  # nan is refused by the command line's own range
    assert not (tmp_path / "demo").exists()


def test_empty_data_are_refused(settings):
    (settings.parent / "data.jsonl").write_text("")
    code, _, err = unmask("train", settings)
    assert code == 2 and err.count("\n") == 1 and "data.jsonl" in err


def test_a_model_without_a_tokeniser_is_sampled_by_ids(settings):
    run = settings.parent / "run"
    assert unmask("train", settings)[0] == 0
    code, out, _ = unmask("sample", run, "length=5", "--prompt-ids", "3 1 4")
    shown = [int(word) for word in out.split()]
    assert code == 0 and shown[:3] == [3, 1, 4] and len(shown) == 8
    code, out, _ = unmask("sample", run, "length=5", "--prompt-ids", "3 1 4", "--json")
    assert json.loads(out)["tokens"] == shown[3:]
    code, out, _ = unmask("sample", run, "length=2", "--prompt-ids", "3 1 4", "--suffix-ids", "5 9")
    assert code == 0 and out.startswith("3 1 4 ") and out.endswith(" 5 9\n") and len(out.split()) == 7
    assert unmask("sample", run, "length=4")[0] == 0
    (settings.parent / "prompts.jsonl").write_text('{"prompt_ids": [3, 1, 4]}\n{"prompt_ids": [9]}\n')
    code, out, _ = unmask("sample", run, "length=5", "--prompts", settings.parent / "prompts.jsonl", "--json")
    assert code == 0 and [json.loads(line)["prompt"] for line in out.splitlines()] == [0, 1]
    assert json.loads(out.splitlines()[0])["tokens"] == shown[3:]
    code, out, _ = unmask("sample", run, "length=5", "--prompt-ids", "3 1 4", "--stream")
    assert code == 0 and out == " ".join(map(str, shown)) + "\n"
    for arguments, sentence in [
        (["--chat"], "has no tokeniser, and a chat is text"),
        (["--chat", "--prompt-ids", "3"], "--chat answers what you type: leave --prompt-ids out"),
        (["--system", "text"], "--system and --chat-template are for --chat"),
        (["--prompts", "missing"], "missing: cannot be read"),
        (["--stream", "--json"], "--stream prints the text of one sample"),
        (["--fill", "text"], "'text' has no hole"),
        (["--prompt-ids", "3 x"], "--prompt-ids '3 x': write token ids"),
        (["--prompt-ids", "3", "--suffix", "y"], "give prompt and suffix as text"),
        (["--prompt", "text"], "this model has no tokeniser"),
        (["length"], "'length' is not of the form option=value, such as length=64"),
        (["temperature=.inf"], "temperature=inf: input should be a finite number"),
    ]:
        code, out, err = unmask("sample", run, *arguments)
        assert code == 2 and out == "" and err.count("\n") == 1 and sentence in err


def test_several_sets_are_evaluated_by_name(settings):
    run, data = settings.parent / "run", settings.parent / "data.jsonl"
    assert unmask("train", settings, "training.steps=1")[0] == 0
    few = ["--packs", "2", "--pack-tokens", "64"]
    code, out, _ = unmask("eval", run, "--data", f"a={data}", "--data", f"b={data}", *few, "--levels", "2", "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == ["a", "b"] and found["a"] == found["b"] and len(found["a"]["levels"]) == 2
    code, out, _ = unmask("eval", run, "--data", data, *few, "--json")
    assert json.loads(out)["nats_per_token"] == found["a"]["nats_per_token"]
    again = shutil.copy(data, data.with_name("again.jsonl"))
    code, out, _ = unmask("eval", run, "--data", data, "--data", again, *few, "--json")
    assert list(json.loads(out)) == [str(data), str(again)]
    code, _, err = unmask("eval", run, "--data", f"a={data}", "--data", "a=x")
    assert code == 2 and "named twice" in err


#: What a verb does at the moment of the signal: it sleeps instead.
STUCK = {
    "prepare": "sys.modules['unmask.data.prepare'].store = stuck",
    "sample": "unmask.sampling.Network.run = stuck",
    "eval": "sys.modules['unmask.evaluation.evaluate'].measure = stuck",
    "export": "unmask.export.hf.card = stuck",
}


@pytest.mark.parametrize("verb", STUCK)
def test_a_signal_ends_every_verb_cleanly(settings, verb):
    number, code = (signal.SIGTERM, 143) if verb in ("prepare", "eval") else (signal.SIGINT, 130)
    folder = settings.parent
    if verb == "prepare":
        arguments = [folder / "data.jsonl", folder / "new" / "out"]
    else:
        assert unmask("train", settings)[0] == 0
        ends = {"sample": ["--prompt-ids", "1 2"], "eval": ["--data", folder / "data.jsonl"]}
        arguments = [folder / "run", *ends.get(verb, [folder / "new" / "out"])]
    before = sorted(path for path in folder.rglob("*"))
    program = (
        "import sys, time, unmask.cli, unmask.data, unmask.sampling, unmask.evaluation, unmask.export.hf\n"
        "def stuck(*_, **__): print('stuck', file=sys.stderr, flush=True); time.sleep(600)\n"
        f"{STUCK[verb]}\n"
        "unmask.cli.main()\n"
    )
    command = [sys.executable, "-c", program, verb, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_line(process, "stuck")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    assert [path for path in sorted(folder.rglob("*")) if path != folder / "new"] == before


def test_runs_are_compared(settings):
    other = settings.parent / "other"
    assert unmask("train", settings)[0] == 0
    assert unmask("train", settings, "optimizer.learning_rate=0.01", f"checkpoint.path={other}")[0] == 0
    code, out, _ = unmask("compare", settings.parent / "run", other, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["at"] == 3 and facts["config"] == {"optimizer.learning_rate": [0.0003, 0.01]}
    assert [run["loss"] for run in facts["runs"]] == [losses(settings.parent / "run")[-1][1], losses(other)[-1][1]]
    code, out, _ = unmask("compare", settings.parent / "run", settings)
    assert code == 0 and "best loss" in out
    code, out, err = unmask("compare", settings.parent / "nothing")
    assert code == 2 and out == "" and err.count("\n") == 1 and "no such run or config" in err


def test_an_export_is_told_in_json(settings):
    assert unmask("train", settings)[0] == 0
    code, out, _ = unmask("export", settings.parent / "run", settings.parent / "exported", "--json")
    facts = json.loads(out)
    weights = settings.parent / "exported" / "model.safetensors"
    assert code == 0 and facts["files"]["model.safetensors"] == weights.stat().st_size
    assert facts["bytes"] == sum(facts["files"].values())


def test_recipes_are_listed_printed_and_written(tmp_path):
    code, out, _ = unmask("recipes")
    assert code == 0 and len(out.splitlines()) == 17
    assert set(json.loads(unmask("recipes", "--json")[1])) == {line.split()[0] for line in out.splitlines()}
    code, out, _ = unmask("recipes", "mdlm")
    assert code == 0 and yaml.safe_load(out)["objective"] == {"name": "mdlm"}
    assert unmask("recipes", "mdlm", "--write", tmp_path / "my.yaml")[0] == 0
    assert (tmp_path / "my.yaml").read_text() == out
    for arguments, sentence in [
        (["mdln"], "unknown recipe 'mdln' (did you mean 'mdlm'?)"),
        (["ar", "--write", tmp_path / "my.yaml"], "is there already"),
        (["--write", tmp_path / "new.yaml"], "name the recipe to write"),
    ]:
        code, out, err = unmask("recipes", *arguments)
        assert code == 2 and out == "" and err.count("\n") == 1 and sentence in err


def test_completion_scripts_are_printed():
    assert "complete -o default" in unmask("completion", "bash")[1]
    code, _, err = unmask("completion", "tcsh")
    assert code == 2 and "unknown shell 'tcsh'" in err


def test_unknown_verbs_and_options():
    assert unmask("trian")[0] == 2
    assert unmask("train", "--foo")[0] == 2
    code, out, _ = unmask("--version")
    assert code == 0 and out.startswith("unmask ")
    code, out, _ = unmask("--help")
    assert code == 0 and "train" in out and "prepare" in out


def greet(name: str, loud: Annotated[bool, typer.Option("--loud", help="In capitals.")] = False):
    """Greet somebody."""
    print(f"HELLO, {name.upper()}" if loud else f"hello, {name}")


def test_other_packages_add_verbs(monkeypatch):
    several = typer.Typer()
    several.command()(greet)
    several.command("leave")(lambda: print("goodbye"))
    points = [EntryPoint("greet", "tests.cli.test_cli:greet", "unmask.verbs")]
    monkeypatch.setattr("unmask.registry.entry_points", lambda group: [p for p in points if p.group == group])
    monkeypatch.setitem(cli.verbs._added, "meet", several)
    assert unmask("greet", "you", "--loud") == (0, "HELLO, YOU\n", "")
    assert unmask("meet", "leave")[1] == "goodbye\n"
    listed = unmask("--help")[1]
    assert listed.index("demo") < listed.index("greet") and "Greet somebody." in listed and "meet" in listed
    assert "Did you mean 'greet'?" in unmask("gret")[2]
    assert "unknown command 'finetune': use unmask train" in unmask("finetune")[2]


def test_a_tokeniser_larger_than_the_model_is_refused(settings):
    from unmask.data import train_tokenizer

    train_tokenizer(["some text"], 300, settings.parent / "tokenizer")
    (settings.parent / "data.jsonl").write_text('{"text": "some text"}\n')
    code, _, err = unmask(
        "train", settings, f"data.tokenizer={settings.parent / 'tokenizer'}", "model.mask_token_id=null"
    )
    told = "holds the token id 262 and the model has 64 embeddings: use the model's own tokeniser"
    assert code == 2 and err.count("\n") == 1 and told in err


def test_prepare_then_train(settings):
    from unmask.data import train_tokenizer

    folder = settings.parent
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text(f"the quick brown fox number {number} " * 20)
    train_tokenizer(["the quick brown fox number"], 280, folder / "tokenizer")
    code, out, _ = unmask("prepare", folder / "text", folder / "prepared", "--tokenizer", folder / "tokenizer")
    assert code == 0 and "3 documents" in out
    overrides = [f"data.train={folder / 'prepared'}", "model.mask_token_id=null", "model.config.vocab_size=512"]
    assert unmask("train", settings, *overrides)[0] == 0
    assert (folder / "run" / "step-00000003" / "hf" / "tokenizer.json").exists()
    code, _, err = unmask("prepare", folder / "text", folder / "prepared", "--tokenizer", folder / "tokenizer")
    assert code == 2 and "--force" in err


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on_exactly(settings, number, code):
    """Interrupted and continued, a run logs the losses of the uninterrupted run, to the last bit."""
    run, whole = settings.parent / "run", settings.parent / "whole"
    process = start("train", settings, "training.steps=24")
    await_line(process, "step 2/")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    stopped = losses(run)[-1][0]
    assert saved_steps(run) == [stopped] and 2 <= stopped < 24
    assert out == (
        f"stopped at step {stopped} of 24: saved {run / f'step-{stopped:08d}'}; "
        f"continue with: unmask train {run / 'config.yaml'}\n"
    )
    code, _, err = unmask("train", run / "config.yaml")
    assert code == 0 and "resuming from" in err
    assert unmask("train", settings, "training.steps=24", f"checkpoint.path={whole}")[0] == 0
    assert losses(run) == losses(whole) and len(losses(whole)) == 24


def test_a_second_ctrl_c_stops_at_once(settings):
    """The first waits for the step in progress, which here never ends."""
    program = (
        "import sys, time\n"
        "from unmask import cli\n"
        "from unmask.training.trainer import Trainer\n"
        "def never(self): print('stuck', file=sys.stderr, flush=True); time.sleep(600)\n"
        "Trainer._train_step = never\n"
        "sys.argv[1:] = ['train', sys.argv[1]]\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", program, str(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_line(process, "stuck")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and saved_steps(settings.parent / "run") == []


def await_line(process, start):
    for line in process.stderr:
        if line.startswith(start):
            return
    raise AssertionError(f"the process ended with {process.wait()} before {start!r}")


def test_a_terminal_gets_a_live_display(settings):
    """Through a pseudo-terminal, as a person sees it."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unmask", "train", str(settings)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(timeout=60) == 0
    os.close(ours)
    text = shown.decode(errors="replace")
    assert "3/3" in text and "tokens/s" in text and "ETA" in text and "\x1b[" in text
