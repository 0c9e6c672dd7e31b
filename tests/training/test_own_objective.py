"""A run on a model that was trained already keeps its objective, block size and shift, unless it is told to convert."""

import json

import pytest

from tests.models.published import PUBLISHED
from tests.models.test_families import write
from tests.training.tiny import MODEL, documents, log
from unmask import Config, Trainer
from unmask.config import ModelConfig
from unmask.convert import convert
from unmask.errors import UserError
from unmask.export import export
from unmask.models import load
from unmask.objectives import build, described
from unmask.planning.dry_run import plan
from unmask.recipes import text
from unmask.training.own_objective import chosen


def folder(path, name=None, options=None):
    """A config.json that says how its model was trained, or does not."""
    path.mkdir(exist_ok=True)
    record = {} if name is None else {"unmask": {"name": name, "options": build(name, options).model_dump(mode="json")}}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **record}))
    return path


def resolved(path, **objective):
    """(name and the options that differ from the defaults, what is said) of a run on a folder."""
    config, said = chosen(Config.parse({"model": {"name": str(path)}, "objective": objective}))
    made = build(config.objective.chosen, config.objective.options())
    return described(made), made, said


OWN = [
    ("mdlm", {}, {}, "mdlm variant=mdlm"),
    ("mdlm", {"variant": "llada"}, {"draws": 2}, "mdlm variant=llada"),
    ("mdlm", {"variant": "llada"}, {"name": "mdlm", "variant": "llada_sft"}, "mdlm variant=llada_sft"),
    ("mdlm", {"variant": "dream"}, {"name": "mdlm"}, "mdlm variant=dream shift=true"),
    ("fast_dllm_v2", {"block_size": 8}, {}, "fast_dllm_v2 block_size=8"),
    ("fast_dllm_v2", {"block_size": 8, "anneal": 0.2}, {"name": "fast_dllm_v2"}, "fast_dllm_v2 block_size=8"),
    ("block_diffusion", {"block_size": 8}, {"name": "block_diffusion", "variant": "sdar"},
     "block_diffusion variant=sdar block_size=8"),
    ("block_diffusion", {"variant": "llada2", "block_schedule": [{"until": 0.5, "size": "full"}, {"size": 16}]}, {},
     "block_diffusion variant=llada2 block_size=16"),
    ("block_diffusion", {"block_size": 16}, {"block_schedule": [{"until": 0.5, "size": 1}, {"size": 16}]},
     "block_diffusion variant=bd3lm block_size=16"),
    ("block_diffusion", {"variant": "a2d"}, {"name": "block_diffusion", "weight": "flat"},
     "block_diffusion variant=a2d block_size=32"),
    ("ar", {}, {}, "ar"),
    ("ar", {}, {"name": "fast_dllm_v2", "block_size": 8}, "fast_dllm_v2 block_size=8"),
    (None, {}, {}, "block_diffusion variant=bd3lm block_size=32"),
    (None, {}, {"name": "mdlm", "variant": "dream"}, "mdlm variant=dream shift=true"),
]  # fmt: skip


@pytest.mark.parametrize("name, options, given, wanted", OWN)
def test_what_is_left_out_is_the_models_own(name, options, given, wanted, tmp_path):
    words, made, said = resolved(folder(tmp_path / "model", name, options), **given)
    assert words == wanted
    assert all(getattr(made, key) == value for key, value in given.items() if key in ("draws", "variant", "weight"))
    told = f"objective {wanted}: what model.name={tmp_path / 'model'} was trained by"
    assert said == ([] if name is None or "name" in given else [told])
    assert getattr(made, "anneal", 0) == 0


ANOTHER = [
    ("mdlm", {"variant": "llada"}, {"name": "block_diffusion"}, "objective.name=block_diffusion"),
    ("mdlm", {"variant": "llada"}, {"name": "ar"}, "objective.name=ar"),
    ("mdlm", {"variant": "llada"}, {"name": "mdlm", "shift": True}, "objective.shift=True"),
    ("mdlm", {"variant": "llada"}, {"variant": "dream"}, "objective.variant=dream"),
    ("block_diffusion", {"block_size": 8}, {"name": "block_diffusion", "block_size": 32}, "objective.block_size=32"),
    ("block_diffusion", {"block_size": 8}, {"name": "block_diffusion", "clean": "causal"}, "objective.clean=causal"),
    ("fast_dllm_v2", {"block_size": 8}, {"name": "block_diffusion", "block_size": 8}, "objective.name=block_diffusion"),
]  # fmt: skip


@pytest.mark.parametrize("name, options, given, key", ANOTHER)
def test_another_objective_is_refused_or_told(name, options, given, key, tmp_path):
    path = folder(tmp_path / "model", name, options)
    with pytest.raises(UserError) as caught:
        resolved(path, **given)
    sentence = str(caught.value)
    assert sentence.startswith(f"{key}: model.name={path} was trained by {name}")
    assert "objective.convert=true" in sentence and "\n" not in sentence
    if "name" in given:
        words, _, said = resolved(path, convert=True, **given)
        own = described(build(name, options))
        assert said == [f"model.name={path} was trained by {own}, and is converted to {words} (objective.convert)"]


def test_what_cannot_be_meant_is_refused(tmp_path):
    own = folder(tmp_path / "own", "mdlm")
    with pytest.raises(UserError, match=r"objective.name is left out, so that it is mdlm, .*unknown key 'block_size'"):
        resolved(own, block_size=8)
    for path, given in [(own, {"name": "mdlm"}), (own, {}), (folder(tmp_path / "ar", "ar"), {"name": "mdlm"}),
                        (folder(tmp_path / "plain"), {"name": "mdlm"})]:  # fmt: skip
        with pytest.raises(UserError, match="objective.convert=true has no effect"):
            resolved(path, convert=True, **given)


@pytest.mark.parametrize(
    "name, wanted",
    [("LLaDA", "mdlm variant=llada"), ("LLaDA2", "block_diffusion variant=llada2 block_size=32"),
     ("Dream", "mdlm variant=dream shift=true"), ("SDAR", "block_diffusion variant=sdar block_size=4"),
     ("Fast-dLLM v2", "fast_dllm_v2 block_size=8"), ("A2D Qwen3", "mdlm variant=llada")],
)  # fmt: skip
def test_the_recipe_for_pairs_keeps_a_familys_own(name, wanted, tmp_path):
    import yaml

    path = write(tmp_path, PUBLISHED[name]())
    section = yaml.safe_load(text("sft")).get("objective", {})
    words, _, said = resolved(path, **section)
    assert words == wanted and ("may be block_diffusion" in said[0]) == (name == "A2D Qwen3")
    own = {"LLaDA": "llada_sft", "LLaDA2": "llada2_sft", "Dream": "dream_sft", "SDAR": "sdar_sft"}
    own["Fast-dLLM v2"] = "fast_dllm_v2_sft"
    if name in own:
        made = resolved(path, **yaml.safe_load(text(own[name]))["objective"])[0]
        assert made == wanted.replace("=llada", "=llada_sft") if name == "LLaDA" else made == wanted
    else:
        assert resolved(path, name="block_diffusion", block_size=4)[0] == "block_diffusion variant=bd3lm block_size=4"


def test_a_run_on_an_export_trains_and_says_its_objective(tmp_path):
    def tree(source, run, **objective):
        return Config.parse({
            "model": source, "data": {"pack_tokens": 64}, "objective": objective,
            "training": {"steps": 1}, "checkpoint": {"path": str(tmp_path / run)}, "log": {"console": "none"},
        })  # fmt: skip

    first = tree({"config": MODEL, "mask_token_id": 63}, "first", name="fast_dllm_v2", block_size=8)
    data = documents(4)
    Trainer(config=first).train(data)
    source = {"name": str(export(tmp_path / "first", tmp_path / "out"))}
    for trained in (tmp_path / "first", tmp_path / "first" / "step-00000001"):
        assert resolved(trained)[0] == "fast_dllm_v2 block_size=8"
    notes = []
    trainer = Trainer(config=tree(source, "second"))
    trainer.message = notes.append
    trainer.train(data)
    assert f"objective fast_dllm_v2 block_size=8: what model.name={tmp_path / 'out'} was trained by" in notes
    written = Config.load(tmp_path / "second" / "config.yaml")
    assert (written.objective.name, written.objective.options()) == ("fast_dllm_v2", {"block_size": 8})
    assert trainer.run.objective.block_size == 8
    longer = written.model_copy(update={"training": written.training.model_copy(update={"steps": 2})})
    assert Trainer(config=longer).train(data).step == 2, "the run goes on by its own config"
    assert [record["step"] for record in log(tmp_path / "second") if record["kind"] == "step"] == [1, 2]
    with pytest.raises(UserError, match="objective.name=mdlm: model.name=.* was trained by fast_dllm_v2 block_size=8"):
        Trainer(config=tree(source, "third", name="mdlm")).train(data)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data))
    asked = tree(source, "fourth")
    asked.data.train = str(tmp_path / "data.jsonl")
    assert plan(asked)["objective"] == "fast_dllm_v2 block_size=8"


def test_a_conversion_records_its_objective(tmp_path):
    base = load(ModelConfig(config=MODEL)).model
    del base.config.mask_token_id
    base.save_pretrained(tmp_path / "base")
    made = convert(tmp_path / "base", tmp_path / "new", objective="block_diffusion", block_size=8, anneal="block-size")
    assert resolved(tmp_path / "new")[0] == "block_diffusion variant=a2d block_size=8"
    given = Config.load(made.recipe).objective
    assert resolved(tmp_path / "new", name=given.name, **given.options())[1].block_schedule is not None
