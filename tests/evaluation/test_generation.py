"""Answers to held-out prompts: against samples of single texts, and what is counted."""

from __future__ import annotations

import json

import pytest

from tests.sampling.reference import MASK, tiny
from tests.sampling.words import START, TURN_END, word_tokenizer
from unmask import sample
from unmask.cli import main, say
from unmask.errors import UserError
from unmask.evaluation import generate
from unmask.evaluation.generation import Question, read
from unmask.objectives import build
from unmask.runs.open import OpenModel
from unmask.sampling import Options, opening

OPTIONS = Options.parse({"length": 6, "steps": 6}, "test")
TOOL = {"type": "function", "function": {"name": "w3", "parameters": {}}}


@pytest.fixture
def opened(monkeypatch):
    model, _ = tiny(seed=4)
    objective = build("block_diffusion", {"block_size": 4}).model_copy(update={"mask_token_id": MASK})
    found = OpenModel(model, word_tokenizer(), MASK, objective)
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    return found


@pytest.fixture
def written(tmp_path):
    def write(*records):
        path = tmp_path / "held-out.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def test_answers_are_those_of_the_sampler_and_scores_are_counted(opened, written):
    prompts = [[1, 2], [START, 32, 5, TURN_END, START, 33], [7, 8, 9]]
    truth = [sample(opened.model, opened.tokenizer, prompt, decoding=opened.objective.decoding, length=6, steps=6,
                    end_tokens=[TURN_END]) for prompt in prompts]  # fmt: skip
    first = truth[0].text.split()[0]
    chat = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": f" {truth[1].text}\n"}]
    path = written(
        {"prompt": "w1 w2", "response": ["w30 w30", "w29"], "contains": first},
        {"messages": chat},
        {"prompt": "w7 w8 w9"},
    )
    found = generate("run", path, OPTIONS)
    assert [one["output"] for one in found["outputs"]] == [one.text for one in truth]
    assert [one["exact_match"] for one in found["outputs"]] == [False, True, None]
    assert [one["contains"] for one in found["outputs"]] == [True, True, None]
    assert found["exact_match"] == {"value": 0.5, "standard_error": pytest.approx(0.125**0.5), "samples": 2}
    assert found["contains"] == {"value": 1.0, "standard_error": 0.0, "samples": 2}
    assert found["tokens"] == sum(len(one.token) for one in truth)
    assert found["passes"] == sum(one.passes for one in truth)
    assert found["ended"] == sum(len(one.token) < 6 for one in truth) / 3
    lines = say.answers(found).splitlines()
    assert lines[0].split() == ["prompt", "output", "expected"]
    assert [line[0] for line in lines[1:4]] == ["~", "=", " "]
    assert lines[5] == "exact match 50.0% +- 35.4% of 2"
    assert json.loads(json.dumps(found)) == found


def test_a_message_that_the_template_leaves_out_is_refused(opened, written):
    opened.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
    path = written({"messages": [{"role": "human", "content": "w3"}, {"role": "user", "content": "w4"}]})
    with pytest.raises(UserError, match=":1: the chat template leaves out message 0, of the role 'human'"):
        generate("run", path, OPTIONS)


def test_the_whole_conversation_and_its_tools_are_asked(opened, written):
    opened.tokenizer.chat_template = (
        "{% if tools %}w{{ tools | length }} {% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} "
        "{% if m.tool_calls %}w9 {% endif %}{% endfor %}"
    )
    turns = [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w3", "arguments": {}}}]},
        {"role": "user", "content": "w4"},
    ]
    ids = [1, 31, 1, 32, 2, 33, 9, 32, 4]
    found = generate("run", written({"messages": turns, "tools": json.dumps([TOOL])}), OPTIONS)
    options = {"decoding": opened.objective.decoding, "length": 6, "steps": 6}
    truth = sample(opened.model, opened.tokenizer, ids, **options)
    assert found["outputs"][0]["output"] == truth.text and found["exact_match"] is None


def test_records_are_read_with_their_lines(written, tmp_path):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    path = written({"messages": [user, assistant, user], "response": "c"}, {"prompt": "x", "contains": ["y", "z"]})
    assert read(path) == [
        Question(f"{path}:1", [user, assistant, user], None, ("c",), ()),
        Question(f"{path}:2", "x", None, (), ("y", "z")),
    ]
    for record, told in [
        ({"prompt": "x", "messages": []}, 'a record is an object with either "prompt" or "messages"'),
        ({"prompt": 3}, '"prompt" is not text'),
        ({"prompt": "x", "response": []}, '"response" is neither text nor a list of texts'),
        ({"prompt": "x", "response": [""]}, '"response" is neither text nor a list of texts'),
        ({"messages": [user, assistant], "response": "c"}, "both say the expected answer"),
        ({"messages": [assistant]}, "nothing comes before the expected answer"),
        ({"messages": "x"}, '"messages" is not a list of objects'),
        ({"messages": [user], "tools": "{"}, '"tools" is a string, and not one of JSON'),
    ]:
        with pytest.raises(UserError, match="held-out.jsonl:1: ") as error:
            read(written(record))
        assert told in str(error.value)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")


def test_an_empty_prompt_is_told_with_its_line(opened, written, monkeypatch):
    shifted = build("fast_dllm_v2", {"block_size": 4}).model_copy(update={"mask_token_id": MASK})
    path = written({"prompt": "w1"}, {"prompt": ""})
    assert generate("run", path, OPTIONS)["records"] == 2  # a model of blocks alone begins with nothing
    monkeypatch.setattr(opening, "open_model", lambda path, **options: opened._replace(objective=shifted))
    with pytest.raises(UserError, match="held-out.jsonl:2: sample: the prompt is empty"):
        generate("run", path, OPTIONS)
    with pytest.raises(UserError, match="preset=llada .method=full. does not fit this model"):
        generate("run", path, Options.parse({"preset": "llada"}, "test"))


def test_the_command_line(opened, written, monkeypatch, capsys):
    path = str(written({"prompt": "w1", "response": "w2"}))
    monkeypatch.setattr("sys.argv", ["unmask", "eval", "run", "--generate", path, "length=3", "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert json.loads(capsys.readouterr().out)["records"] == 1
    monkeypatch.setattr("sys.argv", ["unmask", "eval", "run", "--generate", path, "--seed", "3"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "unmask: eval: --seed is for --data and --tasks, not for --generate\n"
    opened.tokenizer.chat_template = None
    with pytest.raises(UserError, match="run: its tokeniser has no chat template for messages"):
        generate("run", written({"messages": [{"role": "user", "content": "w1"}]}), OPTIONS)
