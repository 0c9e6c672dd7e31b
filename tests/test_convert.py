"""`unmask convert`: what the folder holds, which token is the mask token, and that its recipe trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.models.published import PUBLISHED
from tests.models.test_families import write
from tests.models.test_mask_token import tokenizer
from tests.training.tiny import log
from unmask import Config, Trainer
from unmask.cli import main
from unmask.convert import RECIPES, convert, schedule
from unmask.errors import UserError
from unmask.objectives import build
from unmask.objectives.block_schedule import Phase, checked
from unmask.runs.open import open_model

WORDS = 40


def source(folder: Path, rows: int = 48, words: int = WORDS) -> Path:
    """A causal Qwen3 with `rows` embeddings and a tokeniser of `words` words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=rows, eos_token_id=1, **shape, **more)).save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("objective", RECIPES)
def test_the_folder_is_measured_at_once_and_its_recipe_trains(objective: str, tmp_path: Path) -> None:
    made = convert(source(tmp_path / "base"), tmp_path / "dlm", objective=objective, block_size=4)
    opened = open_model(tmp_path / "dlm")
    assert opened.mask_token_id == opened.tokenizer.mask_token_id == made.mask_token_id == WORDS
    assert made.row == "a padded row that no token had, as it was"
    assert (opened.objective.decoding.kind, opened.objective.decoding.block_size) == ("block", 4)
    tree = yaml.safe_load(Path(made.recipe).read_text())
    config = Config.parse(tree, "run.yaml")
    assert config.data.pack_tokens == 64 and config.evaluation.ar
    build(config.objective.chosen, config.objective.options())
    tree["training"] = {"steps": 2, "batch_size": 2}
    tree["checkpoint"]["path"], tree["log"] = str(tmp_path / "run"), {"console": "none"}
    data = [{"input_ids": [(3 * i + j) % WORDS for i in range(40)]} for j in range(8)]
    trainer = Trainer(config=Config.parse(tree, "run.yaml"))
    summary = trainer.train(data, data[:3])
    assert summary.step == 2
    last = log(tmp_path / "run")[-1]
    causal = last["nats_per_token/validation/ar"]
    assert last["tokens/validation/ar"] == 3 * 39
    with torch.no_grad():
        batch = torch.tensor([record["input_ids"] for record in data[:3]])
        model = open_model(tmp_path / "run").model
        logits = torch.stack([stock(model, ids) for ids in batch])
        wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    assert causal == pytest.approx(float(wanted), rel=2e-2)  # measured in bf16


def stock(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights as transformers' own causal model."""
    from transformers import AutoModelForCausalLM

    config = model.config.__class__.from_dict(model.config.to_dict() | {"attn_implementation": "sdpa"})
    own = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    own.load_state_dict(model.state_dict())
    return own.eval()(ids[None]).logits[0]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_converted_with_the_weights_it_holds(tied: bool, tmp_path: Path) -> None:
    """From a file that gguf's own writer made: the weights, the tokeniser, a mask token, and a recipe that trains."""
    pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.models.test_load import SHAPE, write_gguf

    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    base = LlamaForCausalLM(LlamaConfig(**shape | {"tie_word_embeddings": tied})).eval()
    write_gguf(tmp_path / "tiny.gguf", base)
    made = convert(tmp_path / "tiny.gguf", tmp_path / "dlm", objective="block_diffusion", block_size=4)
    opened = open_model(tmp_path / "dlm")
    assert opened.mask_token_id == opened.tokenizer.mask_token_id == made.mask_token_id == SHAPE["vocab_size"]
    assert opened.tokenizer.convert_tokens_to_ids(opened.tokenizer.tokenize("abc")) == [28, 2]
    ids = torch.arange(SHAPE["vocab_size"])
    with torch.no_grad():
        ours, theirs = stock(opened.model, ids)[:, : SHAPE["vocab_size"]], base(ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    tree = yaml.safe_load(Path(made.recipe).read_text())
    tree["training"] = {"steps": 1, "batch_size": 2}
    tree["checkpoint"]["path"], tree["log"] = str(tmp_path / "run"), {"console": "none"}
    data = [{"input_ids": [(3 * i + j) % 26 for i in range(40)]} for j in range(8)]
    assert Trainer(config=Config.parse(tree, "run.yaml")).train(data, data[:3]).step == 1


def test_an_embedding_without_room_grows_by_the_mean(tmp_path: Path) -> None:
    base = source(tmp_path / "base", rows=WORDS)
    made = convert(base, tmp_path / "dlm", mask_token="[MASK]")
    assert made.mask_token == "[MASK]" and made.mask_token_id == WORDS
    assert made.row == f"a new row, which starts as the mean of the other {WORDS}"
    weight = open_model(tmp_path / "dlm").model.get_input_embeddings().weight
    torch.testing.assert_close(weight[-1], weight[:-1].mean(0))
    assert json.loads((tmp_path / "dlm" / "config.json").read_text())["vocab_size"] == WORDS + 1


@pytest.mark.parametrize(("given", "mask"), [("w7", 7), ("7", 7), (f"w{WORDS - 1}", WORDS - 1)])
def test_a_token_that_is_there_is_taken_by_text_or_id(given: str, mask: int, tmp_path: Path) -> None:
    made = convert(source(tmp_path / "base"), tmp_path / "dlm", mask_token=given)
    assert (made.mask_token, made.mask_token_id) == (f"w{mask}", mask) and made.row.startswith(
        "a token that the model has"
    )


def test_annealing_is_in_the_recipe(tmp_path: Path) -> None:
    base = source(tmp_path / "base")
    for anneal, objective in (("causal", "i_dlm"), ("block-size", "block_diffusion")):
        made = convert(base, tmp_path / anneal, objective=objective, block_size=8, anneal=anneal)
        tree = yaml.safe_load(Path(made.recipe).read_text())
        option = {key: value for key, value in tree["objective"].items() if key in ("anneal", "block_schedule")}
        assert option == ({"anneal": 0.2} if anneal == "causal" else {"block_schedule": schedule(8)})
        Config.parse(tree, "run.yaml")
        assert open_model(tmp_path / anneal).objective.decoding.block_size == 8


@pytest.mark.parametrize("size", [1, 4, 32, 512, 4096])
def test_a_schedule_begins_with_one_token_and_ends_with_the_block_size(size: int) -> None:
    phases = schedule(size)
    checked([Phase(**phase) for phase in phases])
    assert phases[0]["size"] == 1 and phases[-1] == {"size": size} and {"until": 0.75, "size": "full"} in phases


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--objective", "fast_dlm_v2"], "unknown (did you mean 'fast_dllm_v2'?)"),
        (["--anneal", "block-size"], "--anneal block-size is for --objective block_diffusion"),
        (["--anneal", "slowly"], "known: causal, block-size"),
        (["--mask-token", "-1"], "--mask-token '-1': give the text of a token, or an id from 0 on"),
        (["--mask-token", " "], "give the text of a token"),
        (["--mask-token", "1"], "mask token id 1 is the model's EOS token, which data hold"),
        (["--mask-token", "99"], "mask token id 99 does not fit the model's 48 embeddings"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    base = source(tmp_path / "base")
    with mock.patch.object(sys, "argv", ["unmask", "convert", str(base), str(tmp_path / "dlm"), *arguments]):
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "dlm").exists()


def test_a_diffusion_model_and_a_full_folder_are_refused(tmp_path: Path, capsys: Any) -> None:
    base = source(tmp_path / "base")
    with mock.patch.object(sys, "argv", ["unmask", "convert", str(base), str(tmp_path / "dlm"), "--json"]):
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["block_size"] == 32
    with pytest.raises(UserError, match="is a diffusion model already"):
        convert(tmp_path / "dlm", tmp_path / "again")
    causal = json.loads((base / "config.json").read_text()) | {
        "unmask": {"name": "ar", "options": {}},
        "mask_token_id": 5,
    }
    (base / "config.json").write_text(json.dumps(causal))
    assert convert(base, tmp_path / "exported").mask_token_id == 5, "an export of an autoregressive run"
    with pytest.raises(UserError, match="is there already"):
        convert(base, tmp_path / "dlm")
    with pytest.raises(UserError, match="no such folder"):
        convert(tmp_path / "none", tmp_path / "again")


@pytest.mark.parametrize("layout", ["LLaDA", "LLaDA-MoE", "LLaDA2", "SDAR", "A2D Qwen3", "Dream"])
def test_a_foreign_diffusion_model_without_a_mask_token_in_its_config_is_refused(layout: str, tmp_path: Path) -> None:
    made = PUBLISHED[layout]()
    write(tmp_path / "in", made._replace(config={k: v for k, v in made.config.items() if k != "mask_token_id"}))
    with pytest.raises(UserError, match="is a diffusion model already"):
        convert(tmp_path / "in", tmp_path / "out")


def test_the_model_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    base = source(tmp_path / "base")
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds the model that is converted"):
        convert(base, tmp_path / "." / "base", force=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="holds the model that is converted"):
        convert(tmp_path / "files" / "a.gguf", tmp_path / "files", force=True)
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("config.json", "{oops", "cannot be read as JSON"),
        ("config.json", "[1]", "holds no JSON object"),
        (
            "config.json",
            '{"model_type": "qwen3", "unmask": "ar"}',
            'config.json: "unmask" is no record of an objective',
        ),
        ("config.json", '{"model_type": "qwen3", "unmask": {"foo": 1}}', '"unmask" is no record of an objective'),
        ("tokenizer.json", "{}", "its tokeniser cannot be read"),
    ],
)
def test_damaged_files_are_one_sentence(file: str, text: str, sentence: str, tmp_path: Path) -> None:
    (source(tmp_path / "base") / file).write_text(text)
    with pytest.raises(UserError, match=sentence):
        convert(tmp_path / "base", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("print()")
    with pytest.raises(UserError, match="a file must be .gguf"):
        convert(tmp_path / "make.py", tmp_path / "out")
    (tmp_path / "a.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(UserError, match="a.gguf: no tokeniser can be read from it"):
        convert(tmp_path / "a.gguf", tmp_path / "out")


def test_a_folder_whose_name_looks_like_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run.yaml that is written names it as text, by the rules that it is read by."""
    monkeypatch.chdir(tmp_path)
    made = convert(source(tmp_path / "model"), "1e5")
    assert Config.load(made.recipe).model.name == "1e5"
