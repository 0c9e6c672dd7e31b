"""The recipes: each is valid, says what it is for, and trains a few steps on tiny data."""

import json
import shutil

import pytest
import yaml

from tests.models.diffusion_gemma_config import CONFIG
from tests.training.tiny import MODEL
from unmask import Config, Trainer
from unmask.config import rules
from unmask.data import train_tokenizer
from unmask.errors import UserError
from unmask.objectives import build
from unmask.planning.dry_run import plan
from unmask.recipes import names, summary, text, write

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(24)]
PAIRS = [{"prompt": f"{first} + 1 = ", "response": str(first + 1)} for first in range(24)]
CHATS = [{"messages": [{"role": "user", "content": f"{first} + 1?"}, {"role": "assistant", "content": str(first + 1)}]}
         for first in range(24)]  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SFT = ("chat", "llada_sft", "dream_sft", "sdar_sft", "fast_dllm_v2_sft", "llada2_sft")
DATA = {**dict.fromkeys(SFT, CHATS), "sft": PAIRS, "lora": PAIRS, "diffusion_gemma": PAIRS}
GEMMA = {**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": 320}, "image_token_id": 319}
#: Sizes of a test, and one process.
SMALL = {
    "data": {"pack_tokens": 64, "validation": None},
    "training": {"steps": 2, "epochs": 1.0, "batch_size": 2},
    "parallel": {"block_parallel_size": 1},
    "log": {"console": "none"},
}


def test_there_are_the_commonest_jobs():
    assert len(names()) == 17
    for name in names():
        assert summary(name).endswith(".") and len(summary(name)) < 90
        assert f"  unmask train {name}.yaml" in text(name) or f"-m unmask train {name}.yaml" in text(name)
        assert f"runs/{name}" in text(name)


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_valid_to_the_letter(name):
    config = Config.parse(yaml.safe_load(text(name)), name)
    build(config.objective.chosen, config.objective.options())
    rules.check(rules.Known(config))
    given = yaml.safe_load(text(name))
    assert bool(given["model"].get("name")) != bool(given["model"].get("config"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 280, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


@pytest.mark.parametrize("name", names())
def test_every_recipe_trains(name, tokenizer, tmp_path):
    tree = yaml.safe_load(text(name))
    for section, changes in SMALL.items():
        tree.setdefault(section, {}).update(changes)
    config = GEMMA if name == "diffusion_gemma" else {**MODEL, "vocab_size": 320}
    tree["model"] = {**tree["model"], "name": None, "config": config}
    tree["data"] |= {"train": None, "tokenizer": str(tokenizer)}
    tree["checkpoint"] |= {"path": str(tmp_path / "run"), "every": 0}
    tree["evaluation"] = {}
    tree["training"].pop("micro_batch", None)
    if "mask_noise_steps" in tree["model"]:
        tree["model"]["mask_noise_steps"] = 1
    data = DATA.get(name) or [{"text": each} for each in TEXTS]
    summary = Trainer(config=Config.parse(tree, name)).train(data)
    assert summary.step == 2 and summary.loss is not None and summary.loss > 0


def test_a_dry_run_tells_where_answers_end(tokenizer, tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())

    def told(template, name="llada_sft"):
        shutil.copytree(tokenizer, tmp_path / "tokenizer", dirs_exist_ok=True)
        changed = json.dumps({**settings, "chat_template": template})
        (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(changed)
        tree = yaml.safe_load(text(name)) | {"log": {"console": "none"}}
        tree["model"] = {"config": {**MODEL, "vocab_size": 320}}
        tree["data"] = {"train": str(tmp_path / "chats.jsonl"), "tokenizer": str(tmp_path / "tokenizer")}
        return plan(Config.parse(tree, name))["eos"]

    assert told(TEMPLATE) == "never"
    end = TEMPLATE.replace("\n{%", "<|endoftext|>\n{%")
    assert told(end, "sdar_sft") == "each answer (<|endoftext|>)"


def test_an_unknown_name_and_a_file_that_is_there(tmp_path):
    with pytest.raises(UserError, match="unknown recipe 'mdln' .did you mean 'mdlm'"):
        text("mdln")
    path = tmp_path / "new" / "run.yaml"
    write("mdlm", path)
    assert path.read_text() == text("mdlm")
    with pytest.raises(UserError, match="is there already"):
        write("ar", path)
    write("ar", path, force=True)
    assert path.read_text() == text("ar")
