"""Exports over what a folder holds already: as into a new folder, and never over what they are made of."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from tests.models.families import FAMILIES
from unmask.config import ModelConfig
from unmask.data import train_tokenizer
from unmask.errors import UserError
from unmask.export import export
from unmask.export.api import filled
from unmask.export.peft import write
from unmask.models import load
from unmask.objectives import build
from unmask.runs.open import OpenModel, open_model


@pytest.fixture
def folders(tmp_path):
    """base; adapters, and the same beside a tokeniser; whole: the sum, with the tokeniser."""
    tokenizer = train_tokenizer(["def f(x): return x"], 300, tmp_path / "tokenizer")
    start = ModelConfig(config=FAMILIES["qwen3"] | {"vocab_size": 300}, mask_token_id=3)
    load(start).model.save_pretrained(tmp_path / "base")
    settings = ModelConfig(name=str(tmp_path / "base"), mask_token_id=3, lora={"rank": 2})
    model, _, mask = load(settings)
    adapted = OpenModel(model, None, mask, build("mdlm", {}).model_copy(update={"mask_token_id": mask}), settings)
    for name, each in (("adapters", adapted), ("adapters with", adapted._replace(tokenizer=tokenizer))):
        (tmp_path / name).mkdir()
        write(each, tmp_path / name)
    export(tmp_path / "adapters with", tmp_path / "whole", format="hf")
    return tmp_path


@pytest.mark.parametrize("first, second, format", [
    ("whole", "adapters", None), ("adapters with", "whole", None), ("adapters with", "adapters", "hf"),
])  # fmt: skip
def test_nothing_of_another_format_is_left_but_what_is_the_users(first, second, format, folders):
    out, own = folders / "out", {"notes.md": "mine", "other.safetensors": "mine", "thesis.json": "{}"}
    shutil.copytree(folders / first, out)
    for name, text in own.items():
        (out / name).write_text(text)
    export(folders / second, out, format=format, force=True)
    fresh = export(folders / second, folders / "fresh", format=format)
    assert {path.name for path in out.iterdir()} == {path.name for path in fresh.iterdir()} | own.keys()
    assert all((out / name).read_text() == text for name, text in own.items())
    again, wanted = (open_model(each).model.state_dict() for each in (out, fresh))
    assert again.keys() == wanted.keys() and all(torch.equal(again[name], wanted[name]) for name in wanted)


def test_a_config_of_another_program_stays(folders):
    (folders / "out").mkdir()
    (folders / "out" / "config.json").write_text('{"of": "another program"}')
    export(folders / "adapters", folders / "out", force=True)
    assert "another program" in (folders / "out" / "config.json").read_text()


def test_not_over_what_it_is_made_of_nor_a_run(folders):
    (folders / "link").symlink_to(folders / "whole")
    for source, out, said in (
        ("whole", "whole", "is what is exported"), ("whole", "link", "is what is exported"),
        ("adapters", "adapters", "is what is exported"), ("adapters", "base", "is the base of the adapters"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            export(folders / source, folders / out, format="hf", force=True)
    (folders / "run" / "step-00000001").mkdir(parents=True)
    (folders / "run" / "step-00000001" / "state.json").write_text("{}")
    for name in ("run", "run/step-00000001"):
        with pytest.raises(UserError, match="holds checkpoints of a run"):
            export(folders / "whole", folders / name, force=True)


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        with filled(tmp_path / "made") as staged:
            (staged / "model.safetensors").touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "model.safetensors").stat().st_mode & 0o777 == 0o644
