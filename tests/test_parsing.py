"""YAML and JSON of other people: numbers as people mean them, and one line for whatever cannot be read."""

import json
import random

import pytest

from unmask.config import Config, apply_override
from unmask.errors import UserError
from unmask.objectives import named
from unmask.parsing import DEPTH, VALUES, NotYaml, check_characters, json_value, yaml_text, yaml_value
from unmask.sampling.options import Options


@pytest.mark.parametrize(
    "text, value",
    [
        *[("010", 10), ("+7", 7), ("-0", 0), ("0x10", 16), ("0o10", 8), ("0b_", "0b_"), ("1_000", "1_000")],
        *[("1e-4", 1e-4), ("1.", 1.0), (".5", 0.5), ("-.inf", -float("inf")), ("1:30", "1:30"), ("1e", "1e")],
        *[("2020-13-45", "2020-13-45"), ("2020-01-01", "2020-01-01"), ("yes", "yes"), ("off", "off"), ("True", True)],
        *[("", None), ("~", None), ("null", None), ("nil", "nil"), ("=", "="), ("[1, a]", [1, "a"])],
        ("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}", {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}),
    ],
)
def test_numbers_are_what_people_mean(text, value):
    found = yaml_value(text)
    assert found == value and type(found) is type(value)
    if isinstance(value, str):
        assert yaml_value(yaml_text({"key": [value]})) == {"key": [value]}


def test_what_is_written_is_read_again():
    for value in ("010", "1e5", "null", "~", "", "0x1", ".5", "true", "a: b", "<<", "- x", 1e-5, 1e20, None, True, 3):
        assert yaml_value(yaml_text({"key": [value]})) == {"key": [value]}


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)
)
HOSTILE = {
    "[" * 500: f"more than {DEPTH} lists",
    "- " * 10_000: f"more than {DEPTH} lists",
    BOMB: f"more than {VALUES:,} values",
    "&a [*a]": r"\*a stands inside itself",
    "!!int x": "cannot be read",
    "!!float x": "cannot be read",
    "!!bool x": "neither true nor false",
    "!!timestamp x": "cannot be read",
    "!!binary x=": "base64",
    "!!python/object/apply:os.system [true]": "constructor",
    "9" * 5000: "cannot be read",
    "? [a]\n: 1": "no key",
    "{{a: 1}: 2}": "no key",
    "{a: 1, a: 2}": "there twice",
    "a: [1, 2": "expected",
    "a: *b": "undefined alias",
    "\0": "not allowed",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12].encode("unicode_escape").decode())
def test_what_nobody_writes_by_hand_is_one_line(text, tmp_path):
    with pytest.raises(NotYaml, match=HOSTILE[text]) as told:
        yaml_value(text)
    assert "\n" not in str(told.value)
    (tmp_path / "run.yaml").write_text(text)
    readers = [
        lambda: Config.load(tmp_path / "run.yaml"),
        lambda: apply_override({}, f"training.steps={text}"),
        lambda: Options.read([f"length={text}"]),
        lambda: named(f"mdlm,variant={text.replace(',', ';')}"),
    ]
    for read in readers[: 3 if "," in text else 4]:
        with pytest.raises(UserError) as told:
            read()
        assert "\n" not in str(told.value) and len(str(told.value)) < 600


def test_any_damage_to_a_config_is_a_config_or_one_sentence(tmp_path):
    whole = Config().dump()
    draw = random.Random(0)
    for _ in range(60):
        cut, end = sorted(draw.sample(range(len(whole)), 2))
        noise = "".join(draw.choice("{}[]&*!|>%@`'\"#,:?- \t\n0aé~\x07") for _ in range(draw.randint(0, 6)))
        (tmp_path / "run.yaml").write_text(whole[:cut] + noise + whole[min(end, cut + draw.randint(0, 9)) :])
        try:
            Config.load(tmp_path / "run.yaml")
        except UserError as told:
            assert "\n" not in str(told)


def test_overrides_have_the_same_numbers():
    tree = {}
    for text in ("training.steps=010", "optimizer.learning_rate=1e-4", "checkpoint.path=2020-01-01"):
        apply_override(tree, text)
    config = Config.parse(tree, "test")
    assert (config.training.steps, config.optimizer.learning_rate) == (10, 1e-4)
    assert config.checkpoint.path == "2020-01-01"
    with pytest.raises(UserError, match="training.steps"):
        Config.parse({"training": {"steps": yaml_value("1:30")}}, "test")


@pytest.mark.parametrize(
    "text, what",
    [
        ("[" * 100_000, "too many times"),
        ('{"a": ' * 10_000 + "1" + "}" * 10_000, "too many times"),
        ("{", "line 1 column 2"),
        (b"\xff", "not UTF-8"),
        ("9" * 5000, "limit"),
    ],
)
def test_json_that_cannot_be_read_is_one_line(text, what):
    with pytest.raises(ValueError, match=what) as told:
        json_value(text)
    assert "\n" not in str(told.value)


def test_half_a_surrogate_pair_is_no_character():
    check_characters("\U0001f600")
    with pytest.raises(ValueError, match="surrogate"):
        check_characters(json.loads('"\\ud800"'))
