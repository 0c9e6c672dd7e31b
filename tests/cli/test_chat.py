"""The chat loop, its prompts and its commands, on a word tokeniser small enough for the tiny model."""

from __future__ import annotations

import io
import json

import pytest
import torch

from tests.sampling.reference import EOS, MASK, tiny
from tests.sampling.words import START, TEMPLATE, TURN_END, word_tokenizer
from unmask.cli.chat import COMMANDS, talk
from unmask.errors import UserError
from unmask.objectives import build
from unmask.runs.open import OpenModel
from unmask.sampling import opening
from unmask.sampling.chat import Conversation


@pytest.fixture
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def opened(tokenizer, monkeypatch):
    """A model that `talk` finds behind every path; it says no special tokens but the end of its turn."""
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight[[START, EOS]] = 0.0
    objective = build("block_diffusion", {"block_size": 4}).model_copy(update={"mask_token_id": MASK})
    found = OpenModel(model, tokenizer, MASK, objective)
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    return found


def said(monkeypatch, capsys, text, *overrides, **options):
    """(stdout, stderr) of a chat whose stdin is a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    talk("run", list(overrides), **options)
    return capsys.readouterr()


def test_the_tokeniser_is_as_the_tests_count_on(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>", "<|eos|>", "<|mask|>"]) == [36, 37, 38, 39]


def test_a_conversation_renders_what_was_said(tokenizer):
    talk = Conversation(tokenizer, "w9")
    assert talk.end_tokens() == [TURN_END]
    opening = [START, 31, 9, TURN_END]
    assert talk.ask("w1 w2")[0] == [*opening, START, 32, 1, 2, TURN_END, START, 33]
    talk.answered("w1 w2", "w3")
    again = [*opening, START, 32, 1, 2, TURN_END, START, 33, 3, TURN_END, START, 32, 4, TURN_END, START, 33]
    assert talk.ask("w4") == (again, 0)
    # The oldest question and answer go when there is no room; the system prompt and the question stay.
    assert talk.ask("w4", room=len(again) - 1) == ([*opening, START, 32, 4, TURN_END, START, 33], 2)
    talk.answered("w4", "w5", left_out=2)
    assert [message["content"] for message in talk.messages] == ["w4", "w5"]
    talk.reset()
    assert talk.ask("w1 w2")[0] == [*opening, START, 32, 1, 2, TURN_END, START, 33]


def test_answers_follow_from_what_was_said(opened, monkeypatch, capsys):
    out, err = said(monkeypatch, capsys, "w1 w2\n\nw3\n/reset\nw1 w2\n/exit\nw4\n", "length=6")
    answers = out.splitlines()
    assert err == "" and len(answers) == 3 and answers[0] == answers[2] != answers[1]
    out, _ = said(monkeypatch, capsys, "w1 w2\n", "length=6", system="w9")
    assert out.splitlines() != answers[:1]
    out, _ = said(monkeypatch, capsys, "w1 w2", "length=6", stream=True)  # no newline at the end
    assert out == answers[0] + "\n"


def test_the_end_of_a_turn_ends_an_answer(opened, monkeypatch, capsys):
    out, _ = said(monkeypatch, capsys, "w1\n", "length=16", as_json=True)
    whole = json.loads(out)
    assert len(whole["tokens"]) == 16 and not whole["interrupted"]
    with torch.no_grad():
        opened.model.lm_head.weight[TURN_END] = 3 * opened.model.lm_head.weight[whole["tokens"][5]]
    cut = json.loads(said(monkeypatch, capsys, "w1\n", "length=16", as_json=True)[0])
    assert len(cut["tokens"]) < 16 and TURN_END not in cut["tokens"]


def test_ctrl_c_ends_the_answer_not_the_program(opened, monkeypatch, capsys):
    from unmask.sampling import Network

    run, calls = Network.run, []

    def interrupted(self, asked):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(self, asked)

    monkeypatch.setattr(Network, "run", interrupted)
    out, _ = said(monkeypatch, capsys, "w1\nw2\n", "length=6", as_json=True)
    first, second = map(json.loads, out.splitlines())
    assert first["interrupted"] and len(first["tokens"]) < 6
    assert not second["interrupted"] and len(second["tokens"]) == 6


def test_what_is_too_long_is_told_and_the_chat_goes_on(opened, monkeypatch, capsys):
    opened.model.config.max_position_embeddings = 20
    questions = f"{'w1 ' * 12}\nw2\nw3\nw4\n"
    out, err = said(monkeypatch, capsys, questions, "length=5")
    assert "does not fit the model's 20 positions" in err and "the oldest messages are left out" in err
    assert len(out.splitlines()) == 3


def test_commands(opened, monkeypatch, capsys):
    out, err = said(monkeypatch, capsys, "/help\n/rest\n/usr/bin w1\n", "length=2")
    assert "/reset" in err and "unknown command /rest (did you mean '/reset'?)" in err
    assert len(out.splitlines()) == 1  # a path is a question


@pytest.mark.parametrize(
    "template, system, sentence",
    [
        (None, None, "its tokeniser has no chat template; give one with --chat-template FILE"),
        ("{% for %}", None, "the chat template cannot be used: "),
        ("{{ raise_exception('no system role here') }}", "w1", "the chat template cannot be used: no system role here"),
    ],
)
def test_a_chat_that_cannot_be(opened, monkeypatch, capsys, tmp_path, template, system, sentence):
    opened.tokenizer.chat_template = None
    path = None if template is None else tmp_path / "chat.jinja"
    if path:
        path.write_text(template)
    with pytest.raises(UserError) as error:
        said(monkeypatch, capsys, "w1\n", template=path, system=system)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_other_refusals(opened, monkeypatch, capsys, tmp_path):
    with pytest.raises(UserError, match="missing: cannot be read: No such file"):
        said(monkeypatch, capsys, "", template=tmp_path / "missing")
    with pytest.raises(UserError, match="--chat gives one answer: leave num_samples=2 out"):
        said(monkeypatch, capsys, "", "num_samples=2", "temperature=1")
    monkeypatch.setattr(opening, "open_model", lambda path, **options: opened._replace(tokenizer=None))
    with pytest.raises(UserError, match="run: has no tokeniser"):
        said(monkeypatch, capsys, "")


def test_a_template_from_a_file(opened, monkeypatch, capsys, tmp_path):
    opened.tokenizer.chat_template = None
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    out, _ = said(monkeypatch, capsys, "w1\n", "length=3", template=tmp_path / "chat.jinja")
    assert len(out.splitlines()) == 1 and COMMANDS
