"""The card of an export: its header, its words, and its sampler, which is run as a reader would run it."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import yaml

from tests.models.families import FAMILIES
from tests.models.published import PUBLISHED
from tests.models.test_families import write as write_family
from unmask.config import ModelConfig
from unmask.data import train_tokenizer
from unmask.export import export
from unmask.export.card import header
from unmask.export.hf import write
from unmask.models import load
from unmask.objectives import build
from unmask.runs.open import OpenModel
from unmask.sampling import sample

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "ar", {}),
    ("llama", "mdlm", {}),
    ("qwen2", "mdlm", {"shift": True}),
    ("qwen3", "block_diffusion", {"block_size": 4}),
    ("llama", "block_diffusion", {"variant": "nemotron", "block_size": 4}),
    ("qwen3_moe", "fast_dllm_v2", {"block_size": 8}),
    ("qwen3", "i_dlm", {"block_size": 4}),
]


def opened(family: str, name: str, options: dict[str, Any], tokenizer: Any = None, **changes: Any) -> OpenModel:
    """Large random weights, so that some tokens are sure and others are not; EOS is a likely token."""
    model = load(ModelConfig(config={**FAMILIES[family], **changes}, mask_token_id=3), tokenizer).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        model.get_output_embeddings().weight.mul_(8)
    objective = build(name, options).model_copy(update={"mask_token_id": 3})
    return OpenModel(model.eval(), tokenizer, 3, objective)


def parts(folder: Any) -> tuple[dict[str, Any], str, list[str]]:
    """(header, the rest, programs) of a folder's README.md."""
    text = (folder / "README.md").read_text()
    _, head, rest = text.split("---\n", 2)
    return yaml.safe_load(head), rest, re.findall(r"```python\n(.*?)```", rest, re.DOTALL)


def run(program: str) -> tuple[list[int], str]:
    """(the answer, what is printed) of a card's program."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    return names["answer"], printed.getvalue()


@pytest.mark.parametrize(("family", "name", "options"), KINDS, ids=[f"{f}-{n}" for f, n, _ in KINDS])
@pytest.mark.parametrize("prompt", [[1, 5, 7, 9, 11, 2, 30], [8]], ids=["in a block", "one token"])
def test_its_sampler_writes_what_ours_does(family, name, options, prompt, tmp_path, monkeypatch):
    ours = opened(family, name, options)
    write(ours, tmp_path / "model")
    head, text, programs = parts(tmp_path / "model")
    kind = "autoregressive" if name == "ar" else "diffusion-language-model"
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["unmask", kind, name]}
    assert text.startswith(f"# {'An autoregressive' if name == 'ar' else 'A diffusion'} language model")
    assert ("`generate()`" in text) == (name != "ar")
    [program] = programs
    assert "unmask" not in program, "plain transformers"
    program = program.replace("[1, 2, 3], 32", f"{prompt}, 17")
    monkeypatch.chdir(tmp_path)
    wanted = sample(ours.model, None, prompt, decoding=ours.objective.decoding, length=17)
    assert wanted.canvas.steps < 17 or name == "ar", "some tokens are committed together"
    assert run(program)[0] == wanted.token


def test_an_end_token_ends_it(tmp_path, monkeypatch):
    ours = opened("qwen3", "block_diffusion", {"block_size": 4})
    whole = sample(ours.model, None, [8], decoding=ours.objective.decoding, length=17).token
    ours.model.generation_config.eos_token_id = [whole[9], 39]
    write(ours, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    program = parts(tmp_path / "model")[2][0].replace("[1, 2, 3], 32", "[8], 17")
    short = sample(ours.model, None, [8], decoding=ours.objective.decoding, length=17).token
    assert run(program)[0] == short == whole[: whole.index(whole[9])]


def test_with_a_tokeniser_it_takes_and_prints_text(tmp_path, monkeypatch):
    tokenizer = train_tokenizer(["The model is a model"], 280, tmp_path / "tokenizer")
    ours = opened("llama", "mdlm", {}, tokenizer, vocab_size=300)  # the last rows are nobody's
    ours = ours._replace(mask_token_id=1, objective=ours.objective.model_copy(update={"mask_token_id": 1}))
    ours.model.config.mask_token_id = 1
    write(ours, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    answer, printed = run(parts(tmp_path / "model")[2][0])
    wanted = sample(ours.model, tokenizer, "The", decoding=ours.objective.decoding, length=32)
    assert (answer, printed) == (wanted.token, wanted.text + "\n")


def test_what_a_plain_mask_cannot_say_has_no_sampler(tmp_path):
    write(opened("qwen3_sliding", "mdlm", {}), tmp_path / "model")
    _, text, programs = parts(tmp_path / "model")
    assert not programs and "sliding windows" in text


def test_other_layouts_have_the_header_too(tmp_path):
    made = PUBLISHED["SDAR"]()
    made.config["mask_token_id"] = 39
    folder = export(write_family(tmp_path / "base", made), tmp_path / "back")
    head, text, programs = parts(folder)
    assert head["tags"] == ["unmask", "diffusion-language-model", "block_diffusion"] and not programs
    assert "in the layout of `sdar`" in text and "block_diffusion variant=sdar block_size=4" in text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--GSAI-ML--LLaDA-8B-Base/snapshots/0af9", "GSAI-ML/LLaDA-8B-Base"),
        ("exported/ar", None),
        (None, None),
    ],
)
def test_the_base_is_named_where_its_path_tells(path, name):
    head = header("full", "mdlm", "transformers", path)
    assert yaml.safe_load(head.split("---\n")[1]).get("base_model") == name and "# license:" in head
