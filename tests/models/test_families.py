"""Checkpoints in the layouts that other people publish: logits from the formulas, and the way back, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.models import published
from tests.models.published import PUBLISHED
from tests.models.side_by_side import Layer, SideBySide
from tests.training.tiny import MODEL, documents, losses, train
from unmask import Trainer
from unmask.cli import app
from unmask.cli.say import evaluation
from unmask.config import Config, ModelConfig
from unmask.data import train_tokenizer
from unmask.errors import UserError
from unmask.evaluation.evaluate import evaluate
from unmask.export import export
from unmask.models import load
from unmask.models.families import families
from unmask.models.families import folder as folders
from unmask.models.families.materialise import fill
from unmask.models.families.stored import Stored
from unmask.runs.open import open_model
from unmask.sampling import opening, sample
from unmask.sampling.options import Options
from unmask.sampling.session import Session

IDS = torch.tensor([5, 3, 39, 39, 17, 8, 2, 30, 39, 4, 11])


def write(folder, made, shards=1):
    """The folder that a family publishes, its tensors spread over files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config))
    names = list(made.tensors)
    files = [
        f"model-{n + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors" for n in range(shards)
    ]
    for n, file in enumerate(files):
        save_file({name: made.tensors[name] for name in names[n::shards]}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        table = {name: files[n % shards] for n, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def read(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def logits(model):
    """Of IDS, every token seeing all."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=IDS[None], attention_mask=torch.zeros(1, 1, len(IDS), len(IDS)), use_cache=False).logits[
            0
        ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_those_of_the_published_formula(name, tmp_path):
    made = PUBLISHED[name]()
    mask = None if made.config.get("mask_token_id") is not None else 39
    loaded = load(ModelConfig(name=str(write(tmp_path, made, shards=3)), mask_token_id=mask))
    ours, wanted = logits(loaded.model), made.logits(IDS)
    assert (ours[:, : published.VOCABULARY] - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.1
    assert loaded.mask_token_id == (made.config.get("mask_token_id") or 39)
    assert len(loaded.model.get_input_embeddings().weight) == published.VOCABULARY


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_way_back_changes_no_bit(name, tmp_path):
    made = PUBLISHED[name]()
    if "mask_token_id" not in made.config or made.config["mask_token_id"] is None:
        made.config["mask_token_id"] = 39  # else the embedding grows by it
    out = export(write(tmp_path / "there", made, shards=2), tmp_path / "back")
    tensors, config = read(out), json.loads((out / "config.json").read_text())
    assert tensors.keys() == made.tensors.keys()
    for key, tensor in made.tensors.items():
        assert tensors[key].dtype == tensor.dtype and torch.equal(tensors[key], tensor), key
    assert config == made.config


def wide_gate(dtype):
    """LLaDA2 with the router of one layer, of two, in fp32."""
    made = published.llada2(dtype, mask_token_id=39)
    name = "model.layers.2.mlp.gate.weight"
    made.tensors[name] = made.tensors[name].float() + 1e-4
    return made


@pytest.mark.parametrize("make", [published.llada, wide_gate])
def test_dtypes_are_kept_tensor_by_tensor(make, tmp_path, monkeypatch):
    """Published in bf16, with biases of experts in fp32; written in several files."""
    made = make(torch.bfloat16)
    made.config["torch_dtype"] = "bfloat16"
    monkeypatch.setattr(folders.write_folder, "__defaults__", (4000,))
    out = export(write(tmp_path / "there", made), tmp_path / "back")
    tensors = read(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys() == made.tensors.keys()
    assert len(set(index["weight_map"].values())) > 2
    for key, tensor in made.tensors.items():
        assert tensors[key].dtype == tensor.dtype and torch.equal(tensors[key], tensor), key


@pytest.mark.parametrize(
    "name, kind, size, shift",
    [("LLaDA", "full", None, False), ("LLaDA-MoE", "full", None, False), ("LLaDA2", "block", 32, False),
     ("Dream", "full", None, True), ("SDAR", "block", 4, False), ("Fast-dLLM v2", "block", 8, True)],
)  # fmt: skip
def test_a_folder_opens_as_what_it_was_trained_for(name, kind, size, shift, tmp_path):
    made = PUBLISHED[name]()
    mask = None if made.config.get("mask_token_id") is not None else 39
    made.config["eos_token_id"] = None
    opened = open_model(write(tmp_path, made), mask_token_id=mask)
    decoding = opened.objective.decoding
    assert (decoding.kind, decoding.block_size, decoding.shift) == (kind, size, shift)
    found = sample(opened.model, None, [3, 4, 5], decoding=decoding, length=8)
    assert len(found.token) == 8 and opened.mask_token_id not in found.token


@pytest.mark.parametrize(
    "name, objective",
    [("LLaDA, biases, grouped, tied", {"name": "mdlm", "variant": "llada"}),
     ("LLaDA-MoE", {"name": "mdlm", "variant": "llada"}),
     ("LLaDA2, merged", {"name": "block_diffusion", "variant": "llada2", "block_size": 4, "convert": True}),
     ("Dream", {"name": "mdlm", "variant": "dream"}), ("A2D Llama", {"name": "block_diffusion", "block_size": 4}),
     ("SDAR", {"name": "block_diffusion", "variant": "sdar", "block_size": 8, "convert": True}),
     ("Fast-dLLM v2", {"name": "fast_dllm_v2", "block_size": 4, "convert": True})],
)  # fmt: skip
def test_a_run_goes_back_to_the_layout_it_came_from(name, objective, tmp_path):
    made = PUBLISHED[name]()
    made.config["mask_token_id"] = 39
    (write(tmp_path / "base", made) / "modeling.py").write_text("raise RuntimeError('this code is never run')\n")
    tree = {
        "model": {"name": str(tmp_path / "base")},
        "data": {"pack_tokens": 64},
        "objective": objective,
        "training": {"steps": 2, "batch_size": 2},
        "checkpoint": {"path": str(tmp_path / "run")},
        "log": {"console": "none"},
    }
    data = [{"input_ids": [token % 38 for token in record["input_ids"][:60]]} for record in documents(12)]
    summary = Trainer(config=Config.parse(tree)).train(data)
    out = export(summary.checkpoint, tmp_path / "out")
    tensors, config = read(out), json.loads((out / "config.json").read_text())
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in made.tensors.items()}
    assert any(not torch.equal(tensors[key], tensor) for key, tensor in made.tensors.items())
    recorded = config.pop("unmask", None)  # only where it is not the family's own objective
    assert config == made.config
    assert (recorded is None) == (name in ("LLaDA, biases, grouped, tied", "LLaDA-MoE", "Dream"))
    assert (out / "modeling.py").exists()
    again, trained = open_model(out), open_model(summary.checkpoint)
    assert again.objective == trained.objective
    assert torch.equal(logits(again.model), logits(trained.model))
    stock = export(summary.checkpoint, tmp_path / "stock", format="hf")
    assert torch.equal(logits(open_model(stock).model), logits(again.model))
    assert "origin" not in json.loads((stock / "config.json").read_text())


@pytest.mark.parametrize("change", [{"mask_token_id": None}, {"mask_token_id": 40}, {"mask_token_id": 126336}])
def test_a_mask_token_that_is_not_known_or_does_not_fit_is_refused(change, tmp_path):
    """Training, sampling, evaluation and export: a diffusion model never gets a new, untrained mask token."""
    made = published.llada(embedding_size=40, **change)
    folder = write(tmp_path / "there", made)
    known = change["mask_token_id"]
    wanted = "does not fit the model's 40 embeddings" if known else "LLaDA 8B, LLaDA 1.5 was trained with a mask token"
    tree = {"model": {"name": str(folder)}, "checkpoint": {"path": str(tmp_path / "run")}}
    data = [{"input_ids": [4, 5, 6, 7]}] * 3
    for refused in (
        lambda: open_model(folder),
        lambda: export(folder, tmp_path / "back"),
        lambda: evaluate(folder, data),
        lambda: Trainer(config=Config.parse(tree)).train(data),
    ):
        with pytest.raises(UserError, match=wanted) as caught:
            refused()
        assert str(folder) in str(caught.value)
    with pytest.raises(UserError, match="mask token id 40 does not fit"):
        open_model(folder, mask_token_id=40)
    opened = open_model(folder, mask_token_id=39)
    assert opened.mask_token_id == opened.objective.mask_token_id == 39
    assert opened.model.get_input_embeddings().weight.shape[0] == 40
    assert opened.notes == ((f"{folder / 'config.json'}: mask token 39, as asked; it says {known}",) if known else ())
    assert evaluate(folder, data, mask_token_id=39).bound.tokens == 12
    back = export(folder, tmp_path / "back", mask_token_id=39)
    assert json.loads((back / "config.json").read_text())["mask_token_id"] == 39
    assert all(torch.equal(tensor, made.tensors[key]) for key, tensor in read(back).items())


def test_an_export_without_its_mask_token_is_refused(tmp_path):
    model = load(ModelConfig(config=MODEL, mask_token_id=63)).model
    model.config.unmask = {"name": "mdlm", "options": {}, "decoding": {"kind": "full"}}
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="Qwen3ForCausalLM was trained with a mask token"):
        load(ModelConfig(name=str(tmp_path)))
    settings["unmask"] |= {"name": "ar", "decoding": {"kind": "causal"}}  # has none yet, and gets one
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load(ModelConfig(name=str(tmp_path))).mask_token_id == 64


def test_a_model_that_may_have_been_trained_in_blocks_can_be_told_to_be(tmp_path, capsys):
    made = PUBLISHED["A2D Qwen3"]()
    made.config["mask_token_id"] = 39
    folder = write(tmp_path / "a2d", made)
    assert "does not tell, and where the model was trained by block_diffusion" in open_model(folder).notes[0]
    told = open_model(folder, objective="block_diffusion,block_size=4")
    assert told.objective.decoding == ("block", 4, False, False) and not told.notes
    options = ["objective=block_diffusion", "block_size=4", "length=8"]
    session = opening.session(folder, options)
    assert session.decoding == told.objective.decoding and session.method == "block"
    [work] = session.works([[3, 4, 5]], [None])
    assert len([*session.batches([work])][0][0].canvas.answer()) == 8
    with pytest.raises(UserError, match="method=block does not fit"):
        opening.session(folder, ["method=block"])
    data = [{"input_ids": [4, 5, 6, 7, 8, 9]}] * 3
    wanted = evaluate(export(folder, tmp_path / "blocks", objective="block_diffusion,block_size=4"), data)
    assert evaluate(folder, data, objective="block_diffusion,block_size=4").bound == wanted.bound
    assert evaluate(folder, data).bound != wanted.bound
    capsys.readouterr()
    told = CliRunner().invoke(app, ["eval", str(folder), "--data", str(tokens(tmp_path, data)), "--objective", "ar"])
    assert told.stdout == evaluation(evaluate(folder, data, objective="ar").asdict()) + "\n"
    assert "used as" not in told.stderr  # it does not tell: nothing to contradict


def tokens(folder, records):
    path = folder / "held-out.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_an_objective_against_the_folders_word_is_remarked(tmp_path):
    folder = write(tmp_path, published.llada())
    opened = open_model(folder, objective="block_diffusion,block_size=4")
    assert opened.objective.decoding.kind == "block"
    assert "used as block_diffusion variant=bd3lm block_size=4, as asked; it says mdlm variant=llada" in opened.notes[0]
    for text, wrong in [
        ("mdml", "unknown objective"),
        ("mdlm,shift", "is not of the form"),
        ("mdlm,size=4", "unknown key"),
    ]:
        with pytest.raises(UserError, match=wrong):
            open_model(folder, objective=text)


def test_end_tokens_of_a_family_end_an_answer(tmp_path, monkeypatch):
    opened = open_model(write(tmp_path, published.llada()))
    monkeypatch.setattr(families["llada"], "end_tokens", (7, 126348))  # the second is of a larger vocabulary
    session = Session(opened.model, None, Options(), opened.objective.decoding)
    assert session.ends == {1, 7}, "config.json says 1"


def test_a2d_masks_are_those_of_their_bases():
    masks = {kind: families["a2d"]().mask({"model_type": kind}) for kind in families["a2d"].types}
    assert masks == {"a2d-qwen3": 151669, "a2d-qwen2": 151665, "a2d-llama": None}


REFUSED = {
    "shared expert": (lambda m: m.tensors.update({"model.layers.0.mlp.shared_expert.gate_proj.weight": torch.ones(2)}),
                      published.llada_moe, "with a shared expert"),
    "expert bias": (lambda m: m.tensors.update({"model.layers.0.mlp.gate.expert_bias": torch.ones(8)}),
                    published.llada_moe, "with an expert bias"),
    "dense layer": (lambda m: m.tensors.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2)}),
                    published.llada_moe, "with a dense layer"),
    "alibi": (lambda m: m.config.update(alibi=True), published.llada, "alibi=True"),
    "missing field": (lambda m: m.config.pop("d_model"), published.llada, "'d_model'"),
    "missing tensor": (lambda m: m.tensors.pop("model.transformer.blocks.1.attn_out.weight"), published.llada,
                       "holds no model.transformer.blocks.1.attn_out.weight"),
    "other tensor": (lambda m: m.tensors.update({"model.transformer.extra": torch.ones(2)}), published.llada,
                     "holds model.transformer.extra"),
    "shape": (lambda m: m.config.update(mlp_hidden_size=28), published.llada, "has the shape"),
    "window": (lambda m: m.config.update(use_sliding_window=True), published.llada2, "use_sliding_window=True"),
    "heads": (lambda m: m.config.update(multi_query_attention=True), published.llada, "n_kv_heads=4 beside"),
    "clipped": (lambda m: m.config.update(clip_qkv=8.0), published.llada, "clip_qkv=8.0"),
    "another head": (lambda m: m.tensors.update({"lm_head.weight": torch.ones(40, 16)}), PUBLISHED["A2D Qwen2"],
                     "lm_head.weight is another tensor"),
    "another architecture": (lambda m: m.config.update(architectures=["DreamForCausalLM"]), PUBLISHED["Dream"],
                             "Dream 7B is DreamModel, and another model"),
    "a list of architectures": (lambda m: m.config.update(architectures=5), published.llada,
                                "config.json has architectures=5: give a list"),
    "quantised": (lambda m: m.config.update(quantization_config={"quant_method": "fp8"}), PUBLISHED["Dream"],
                  "has quantization_config: the folder is quantised"),
    "no heads": (lambda m: m.config.update(n_heads=0), published.llada, "n_heads=0: give a whole number"),
    "group": (lambda m: m.config.update(block_group_size="2"), published.llada, "block_group_size='2': give a whole"),
    "rotary base": (lambda m: m.config.update(rope_theta=-1.0), published.llada, "rope_theta=-1.0: give a number"),
    "rotary scaling": (lambda m: m.config.update(rope_scaling="linear"), published.llada, "rope_scaling='linear'"),
    "no expert": (lambda m: m.config.update(num_experts_per_tok=0), published.llada2, "num_experts_per_tok=0: give"),
    "no block": (lambda m: m.config.update(block_size=0), PUBLISHED["SDAR"], "block_size=0: give a whole number"),
    "mask token": (lambda m: m.config.update(mask_token_id="39"), published.llada,
                   "config.json has mask_token_id='39': give the id"),
    "activation": (lambda m: m.config.update(hidden_act="nonsense"), PUBLISHED["Dream"],
                   "config.json: dream cannot be built from it: it knows no 'nonsense'"),
    "a scalar": (lambda m: m.tensors.update({"model.layers.0.attention.query_key_value.weight": torch.tensor(1.0)}),
                 published.llada2, "has the shape []"),
    "float8": (lambda m: m.tensors.update({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
               PUBLISHED["Dream"], "is stored as F8_E4M3; store it as"),
    "truths": (lambda m: m.tensors.update({"model.norm.weight": torch.ones(16) > 0}), PUBLISHED["Dream"],
               "is stored as BOOL; store it as"),
    "unknown type": (lambda m: m.config.update(model_type="nobodys", architectures=["Other"]), published.llada,
                     "model_type='nobodys'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_module_computes_is_refused_by_name(case, tmp_path):
    change, make, sentence = REFUSED[case]
    made = make()
    change(made)
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")) as caught:
        load(ModelConfig(name=str(write(tmp_path, made))))
    assert str(tmp_path) in str(caught.value)


def test_damaged_folders(tmp_path):
    folder = write(tmp_path, published.llada(), shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(UserError, match="not a safetensors file"):
        load(ModelConfig(name=str(folder)))
    second.unlink()
    with pytest.raises(UserError, match="this file, and it is missing"):
        load(ModelConfig(name=str(folder)))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load(ModelConfig(name=str(folder)))


@pytest.mark.parametrize(
    "index, sentence",
    [("{", "cannot be read as JSON: Expecting"), ("{}", "it has no weight_map"), ("[]", "holds no JSON object"),
     ('{"weight_map": ["a"]}', "gives no file by tensor"), ('{"weight_map": {}}', "gives no file by tensor"),
     ('{"weight_map": {"a": "sub"}}', "sub: the index names this file, and it is a folder"),
     ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "model-00001-of-00002.safetensors holds no a;")],
)  # fmt: skip
def test_damaged_indices(index, sentence, tmp_path):
    folder = write(tmp_path, published.llada(), shards=2)
    (folder / "sub").mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=sentence):
        load(ModelConfig(name=str(folder)))


def test_a_tokeniser_comes_and_goes_with_its_model(tmp_path):
    """Its classes may be named in auto_map: what the folder holds is read, nothing of it is run."""
    made = published.llada(embedding_size=300, vocab_size=300)
    made.tensors["model.transformer.wte.weight"] = torch.randn(300, published.WIDTH)
    made.tensors["model.transformer.ff_out.weight"] = torch.randn(300, published.WIDTH)
    made.config["mask_token_id"] = 1
    folder = write(tmp_path / "there", made)
    train_tokenizer(["a text " * 50], 280, folder)
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text()) | {"auto_map": {"AutoTokenizer": ["tokenization.Other", None]}}
    settings.write_text(json.dumps(known))
    back = export(folder, tmp_path / "back")
    ours, theirs = open_model(back).tokenizer, load(ModelConfig(name=str(folder))).tokenizer
    assert ours.get_vocab() == theirs.get_vocab() and ours.mask_token_id == 1


def test_a_tokeniser_of_another_class_is_read_and_its_code_is_not(tmp_path):
    """Dream's: vocab.json, merges.txt and a class in the folder."""
    made = PUBLISHED["Dream"]()
    folder = write(tmp_path / "dream", made)
    vocab = {token: n for n, token in enumerate(["<|endoftext|>", "a", "b", "ab", "c"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization.DreamTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization.py").write_text("raise RuntimeError('never run')\n")
    tokenizer = load(ModelConfig(name=str(folder))).tokenizer
    assert tokenizer.encode("abc") == [3, 4]
    (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match="code in the folder makes its tokeniser"):
        load(ModelConfig(name=str(folder)))


@pytest.mark.parametrize("name", ["../outside/x.safetensors", "/outside/x.safetensors", "a/x.safetensors", "..\\x"])
def test_an_index_leads_nowhere_else(tmp_path, name):
    """Not even to a file that is there and whole."""
    (tmp_path / "outside").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "outside" / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    named = name.replace("/outside", str(tmp_path / "outside"), 1) if name.startswith("/") else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": named}}))
    with pytest.raises(UserError, match="which is no file of this folder"):
        Stored(folder)


def test_a_family_with_a_forward_of_its_own_is_one_file_and_one_line(tmp_path, monkeypatch):
    """Trained from a configuration, sampled, exported, opened, filled late, and trained further."""
    monkeypatch.setitem(families._added, "side_by_side", SideBySide)
    trainer = train(tmp_path / "run", "training.steps=2", model={"model_type": "side_by_side"})
    opened = open_model(tmp_path / "run")
    assert {type(layer) for layer in opened.model.model.layers} == {Layer}
    found = sample(opened.model, None, [3, 4, 5], decoding=opened.objective.decoding, length=8, steps=4)
    assert len(found.token) == 8
    out = export(tmp_path / "run", tmp_path / "out")
    again, wanted = open_model(out), opened.model.state_dict()
    late = load(ModelConfig(name=str(out)), unread=True).model
    fill(late)
    for model in (again.model, late, trainer.run.model):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert again.objective == opened.objective and torch.equal(logits(again.model), logits(opened.model))
    assert not torch.equal(logits(opened.model), logits(AutoModelForCausalLM.from_pretrained(out)))  # Qwen3's layers
    options = ("model.config=null", f"model.name={out}", "model.mask_token_id=null", "training.steps=1")
    assert len(losses(tmp_path / "run")) == 2 and train(tmp_path / "more", *options).summary.step == 1
