"""Shell completion: what is offered, and bash itself asking for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unmask.cli.complete import complete, script
from unmask.config import keys
from unmask.errors import UserError

KNOWN = keys()


@pytest.mark.parametrize(
    ("before", "incomplete", "offered"),
    [
        ([], "optimizer.l", ["optimizer.learning_rate="]),
        (["training.steps=3"], "training.prec", ["training.precision="]),
        ([], "objective.block_si", ["objective.block_size="]),
        ([], "training.precision=", [f"training.precision={kind}" for kind in ("fp32", "bf16", "fp16")]),
        ([], "model.fused=t", ["model.fused=true"]),
        (["training.precision", "="], "b", ["bf16"]),
        (["training.precision"], "", ["fp32", "bf16", "fp16"]),
        (["training.precision", "=", "bf16"], "checkpoint.ev", ["checkpoint.every="]),
        ([], "nothing", []),
    ],
)
def test_what_is_offered(before, incomplete, offered):
    assert complete(before, incomplete, KNOWN) == offered


def test_unknown_shells_are_refused():
    with pytest.raises(UserError, match="unknown shell 'bsh' .did you mean 'bash'"):
        script("bsh")
    assert "compdef" in script("zsh") and "complete --command" in script("fish")


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """A function (words, position) -> what bash offers there, with an `unmask` on the path."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "unmask"
    program.write_text(f"#!{sys.executable}\nfrom unmask.cli import main\nmain()\n")
    program.chmod(0o755)
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}

    def ask(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        lines = [
            'eval "$(unmask completion bash)"',
            f"COMP_WORDS=({quoted})",
            f"COMP_CWORD={len(words) - 1}",
            "compopt() { echo no space; }",
            "_unmask_completion unmask",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return ask


def test_bash_completes_verbs_keys_and_values(bash):
    assert set(bash("unmask", "")) >= {"train", "sample", "eval", "compare", "doctor", "recipes"}
    assert bash("unmask", "train", "run.yaml", "optimizer.learning") == ["no space", "optimizer.learning_rate="]
    assert bash("unmask", "train", "run.yaml", "training.precision", "=", "bf") == ["bf16"]
    assert bash("unmask", "recipes", "mdl") == ["mdlm"]
