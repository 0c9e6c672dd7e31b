"""What every section of settings refuses, key by key, and how a mistake is told."""

import math
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest

from unmask import Config, ParallelConfig
from unmask.config import Section, apply_override, keys
from unmask.errors import UserError
from unmask.objectives import objectives
from unmask.objectives.block_schedule import Phase
from unmask.sampling import Options

SECTIONS = [field.annotation for field in Config.model_fields.values()]
SECTIONS += [objectives[name] for name in ("ar", "mdlm", "block_diffusion", "fast_dllm_v2")] + [Options, Phase]
KEYS = [(section, key) for section in SECTIONS for key, field in section.model_fields.items() if not field.exclude]


def members(annotation):
    """The types a value may have, unions opened."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {member for argument in get_args(annotation) for member in members(argument)}
    return {annotation}


def name(value):
    return value.__name__ if isinstance(value, type) else value


NUMBERS = [(section, key) for section, key in KEYS if members(section.model_fields[key].annotation) & {int, float}]
UNIONS = [(section, key) for section, key in KEYS if len(members(section.model_fields[key].annotation)) > 1]


def refusal(section, key, value):
    with pytest.raises(UserError) as error:
        section.parse({**({"size": 8} if section is Phase else {}), key: value}, "here")
    assert str(error.value).startswith("here: ") and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("section", "key"), NUMBERS, ids=name)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, 10**30])
def test_no_number_is_infinite_a_truth_value_or_beyond_64_bits(section, key, value):
    if value == 10**30 and int not in members(section.model_fields[key].annotation):
        value = math.inf
    assert f"here: {key}" in refusal(section, key, value)


def test_nor_one_inside_a_list():
    assert "optimizer.betas.1=nan" in refusal(Config, "optimizer", {"betas": [0.9, math.nan]})
    assert "optimizer.betas: True is no number" in refusal(Config, "optimizer", {"betas": [0.9, True]})


@pytest.mark.parametrize(("section", "key"), UNIONS, ids=name)
@pytest.mark.parametrize("value", ["may be", {"x": 1}, [[2]]], ids=str)
def test_a_union_is_told_by_its_key(section, key, value):
    kinds = members(section.model_fields[key].annotation)
    if type(value) in {get_origin(kind) or kind for kind in kinds}:
        value = [[2]]
    text = refusal(section, key, value)
    assert text.startswith((f"here: {key}=", f"here: {key}: ")) or (
        key in ("block_schedule", "stage_layers") and f": {key}.0" in text
    )
    assert "more)" not in text and f"{key}.bool" not in text and "literal[" not in text


def test_the_choices_of_a_union_are_listed():
    assert refusal(Config, "model", {"skip_last_layer": "maybe"}) == (
        "here: model.skip_last_layer='maybe': it takes true or false or `auto`"
    )


def test_sections_made_in_python_refuse_in_a_sentence():
    with pytest.raises(UserError, match="ParallelConfig: unknown key 'data_paralel_size' .did you mean 'data_parallel"):
        ParallelConfig(data_paralel_size=2)
    with pytest.raises(UserError, match="ParallelConfig: data_parallel_size=0: "):
        ParallelConfig(data_parallel_size=0)
    with pytest.raises(UserError, match="ParallelConfig: data_parallel_size='two': "):
        ParallelConfig(data_parallel_size="two")
    with pytest.raises(UserError, match="Config: training.steps=-1: "):
        Config(training={"steps": -1})
    with pytest.raises(UserError, match="Config: training.batch_size=3 must be a multiple"):
        Config(training={"batch_size": 3, "micro_batch": 2})


def test_the_path_of_a_mistake_is_whole_and_others_are_counted():
    wrong = {"training": {"steps": 0, "seed": -1}, "log": {"evry": 3}}
    with pytest.raises(UserError) as error:
        Config.parse(wrong, "run.yaml")
    assert str(error.value) == "run.yaml: training.steps=0: input should be greater than or equal to 1 (and 2 more)"


def test_an_override_without_a_value_is_told_in_the_words_of_its_verb():
    with pytest.raises(UserError, match="'steps' is not of the form key.path=value, such as training.steps=100"):
        apply_override({}, "steps")
    with pytest.raises(UserError, match="'length' is not of the form option=value, such as length=64"):
        Options.read(["length"])


def test_a_section_may_have_any_whole_float():
    class Own(Section):
        number: int = 3

    assert Own.parse({"number": 1e3}).number == 1000


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"learning_rate": 1}, "unknown key 'learning_rate' (did you mean 'optimizer.learning_rate'?)"),
        ({"training": {"learning_rate": 1}}, "'training.learning_rate' (did you mean 'optimizer.learning_rate'?)"),
        ({"block_size": 4}, "unknown key 'block_size' (did you mean 'objective.block_size'?)"),
        ({"training": {"block_size": 4}}, "'training.block_size' (did you mean 'objective.block_size'?)"),
        ({"log": {"learning_rat": 4}}, "'log.learning_rat' (did you mean 'optimizer.learning_rate'?)"),
        ({"optimiser": {"name": "adamw"}}, "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        ({"training": {"stepz": 4}}, "unknown key 'training.stepz' (did you mean 'steps'?)"),
        ({"model": {"hidden_size": 4}}, "unknown key 'model.hidden_size'; valid here: name, config"),
        ({"schedule": 3}, "schedule=3: it takes the keys {name, warmup"),
    ],
)
def test_a_key_in_the_wrong_place_is_sent_to_its_own(tree, hint):
    with pytest.raises(UserError) as error:
        Config.parse(tree, "run.yaml")
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_an_option_of_a_run_in_the_objective_is_sent_there():
    with pytest.raises(UserError, match=r"unknown key 'batch_size' \(did you mean 'training.batch_size'\?\)"):
        objectives["mdlm"].parse({"batch_size": 3}, "objective mdlm")


def test_a_key_that_is_there_twice_is_refused_with_its_line(tmp_path):
    (tmp_path / "run.yaml").write_text("training:\n  steps: 3\nlog: {}\ntraining:\n  seed: 1\n")
    with pytest.raises(UserError, match="run.yaml:4: not valid YAML: 'training' is there twice"):
        Config.load(tmp_path / "run.yaml")


def test_keys_are_all_keys_and_the_options_of_objectives():
    known = keys()
    assert {"optimizer.learning_rate", "log.trackers", "objective.block_size", "objective.eps"} <= set(known)
    assert "objective.mask_token_id" not in known
