"""What `unmask sample` prints: texts, ids, JSON lines, finished blocks, and refusals."""

from __future__ import annotations

import io
import json

import pytest

from tests.sampling.reference import MASK, tiny
from tests.sampling.test_stream import Bytes
from unmask.cli.samples import run
from unmask.errors import UserError
from unmask.objectives import build
from unmask.runs.open import OpenModel
from unmask.sampling import Fill, opening, sample
from unmask.sampling.prompts import Asked


@pytest.fixture
def opened(monkeypatch):
    model, _ = tiny()
    objective = build("block_diffusion", {"block_size": 4}).model_copy(update={"mask_token_id": MASK})
    found = OpenModel(model, None, MASK, objective)
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    return found


@pytest.fixture
def spoken(opened, monkeypatch):
    """The same with a tokeniser, and prompts that need none."""
    found = opened._replace(tokenizer=Bytes())
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    monkeypatch.setattr("unmask.sampling.session.Encoder", Letters)
    monkeypatch.setattr("unmask.sampling.session.beginning", lambda tokenizer: ())
    return found


class Letters:
    def __init__(self, tokenizer, eos):
        assert eos is False

    def encode(self, texts, follows):
        import numpy as np

        return [np.array([2 + ord(letter) % 7 for letter in text]) for text in texts]


def expected(opened, prompt, **options):
    return sample(opened.model, opened.tokenizer, prompt, decoding=opened.objective.decoding, **options)


def test_ids_of_several_prompts(opened, capsys):
    assert run("run", ["length=5"], [Asked([1, 2]), Asked([3])]) is False
    first, second = (expected(opened, prompt, length=5).token for prompt in ([1, 2], [3]))
    words = [" ".join(map(str, ids)) for ids in ([1, 2, *first], [3, *second])]
    assert capsys.readouterr().out == f"--- prompt 1 ---\n{words[0]}\n--- prompt 2 ---\n{words[1]}\n"


def test_json_lines(opened, capsys):
    run(
        "run", ["length=5", "num_samples=2", "temperature=1", "batch_size=1"], [Asked([1, 2]), Asked([3])], as_json=True
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert lines[3]["tokens"] == expected(opened, [3], length=5, temperature=1.0, seed=1).token
    assert set(lines[0]) == {"text", "tokens", "passes", "interrupted", "prompt", "sample"}


def test_texts_with_holes(spoken, capsys):
    text = Fill.parse("abc[MASK:3]de[MASK:2]f")
    holes = [hole.text for hole in expected(spoken, text).holes]
    assert run("run", [], [Asked(text)]) is False
    assert capsys.readouterr().out == f"abc{holes[0]}de{holes[1]}f\n"
    run("run", [], [Asked(text)], stream=True)
    assert capsys.readouterr().out == f"abc{holes[0]}de{holes[1]}f\n"
    run("run", [], [Asked(text)], as_json=True)
    assert [hole["text"] for hole in json.loads(capsys.readouterr().out)["holes"]] == holes


def test_a_suffix_is_printed_after_the_hole(spoken, capsys):
    middle = expected(spoken, "abc", suffix="de", length=3).text
    run("run", ["length=3"], [Asked("abc", "de")])
    assert capsys.readouterr().out == f"abc{middle}de\n"


class Pipe(io.StringIO):
    """A stdout that remembers what it held at every flush."""

    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        self.flushed.append(self.getvalue())


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_a_stream_prints_finished_blocks_at_once(kind, spoken, monkeypatch):
    prompt = "abc" if kind == "text" else [5, 6, 7]
    out = Pipe()
    monkeypatch.setattr("sys.stdout", out)
    run("run", ["length=9"], [Asked(prompt)], stream=True)
    whole = expected(spoken, prompt, length=9)
    if kind == "ids":
        steps = [3, 4, 8, 12]  # the prompt, the rest of its block, two blocks
        words = list(map(str, [5, 6, 7, *whole.token]))
        assert out.getvalue() == " ".join(words) + "\n"
        assert [len(text.split()) for text in dict.fromkeys(map(str.strip, out.flushed))] == steps
    else:
        assert out.getvalue() == f"abc{whole.text}\n"
        assert len(dict.fromkeys(map(str.strip, out.flushed))) == 4


def test_ctrl_c_in_a_batch_leaves_out_what_was_not_begun(opened, monkeypatch, capsys):
    from unmask.sampling import Network

    forward, calls = Network.run, []

    def interrupted(self, asked):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(self, asked)

    monkeypatch.setattr(Network, "run", interrupted)
    assert run("run", ["length=5", "batch_size=1"], [Asked([n]) for n in range(4)], as_json=True) is True
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 1 and lines[0]["interrupted"]


def test_refusals(opened, monkeypatch):
    with pytest.raises(UserError, match="--stream prints the text of one sample"):
        run("run", ["length=5"], [Asked([1]), Asked([2])], stream=True)
    with pytest.raises(UserError, match="--stream prints the text of one sample"):
        run("run", ["length=5"], [Asked([1])], stream=True, as_json=True)
    with pytest.raises(UserError, match="length=5 has no effect here: it needs a prompt"):
        run("run", ["length=5"], [Asked(Fill(([1], [2]), (3,)))])
    with pytest.raises(UserError, match="p.txt:7: sample: the prompt or suffix holds token id 99"):
        run("run", ["length=5"], [Asked([1], where="p.txt:3"), Asked([99], where="p.txt:7")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="sample runs in one process"):
        run("run", [], [Asked([1])])


@pytest.fixture
def foreign(monkeypatch):
    """A model as it comes from LLaDA's folder."""
    model, _ = tiny()
    model.config.origin = {"family": "llada"}
    objective = build("mdlm", {"variant": "llada"}).model_copy(update={"mask_token_id": MASK})
    found = OpenModel(model, None, MASK, objective)
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    return found


PUBLISHED = "sampling as llada is published (method=full strategy=low_confidence); --as none for the defaults\n"


@pytest.mark.parametrize(
    "given, preset, options",
    [
        ([], "llada", {}),
        (["steps=3", "temperature=0.7", "seed=2"], "llada", {"steps": 3, "temperature": 0.7, "seed": 2}),
        (["preset=none"], None, {}),
        (["preset=none", "temperature=0.7"], None, {"temperature": 0.7}),
        (["preset=dream", "temperature=1"], "dream", {"temperature": 1.0}),
        (["strategy=margin"], None, {"strategy": "margin"}),
        (["threshold=0.2"], None, {"threshold": 0.2}),
        (["method=full"], None, {"method": "full"}),
    ],
)
def test_a_model_of_a_family_is_sampled_as_its_authors_do(given, preset, options, foreign, capsys):
    run("folder", ["length=9", *given], [Asked([1, 2])])
    printed = capsys.readouterr()
    known = {"preset": preset} if preset else {}
    assert printed.out.split() == ["1", "2", *map(str, expected(foreign, [1, 2], length=9, **known, **options).token)]
    assert printed.err == (PUBLISHED if preset == "llada" else "")


def test_the_options_in_force_are_told(foreign, capsys):
    foreign.model.config.origin = {"family": "dream"}
    run("folder", ["length=9", "temperature=0.7", "top_p=0.5"], [Asked([1, 2])])
    told = "strategy=low_entropy schedule=timesteps tempered=true temperature=0.7 top_p=0.5); --as none"
    assert told in capsys.readouterr().err


def test_a_model_trained_to_be_decoded_in_another_way_is_not(foreign, monkeypatch, capsys):
    objective = build("block_diffusion", {"block_size": 4}).model_copy(update={"mask_token_id": MASK})
    blocks = foreign._replace(objective=objective)
    monkeypatch.setattr(opening, "open_model", lambda path, **options: blocks)
    run("folder", ["length=9"], [Asked([1, 2])])
    printed = capsys.readouterr()
    assert printed.out.split() == ["1", "2", *map(str, expected(blocks, [1, 2], length=9).token)] and not printed.err
