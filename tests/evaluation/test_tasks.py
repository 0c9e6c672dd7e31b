"""Likelihoods of answers against SDPA with a dense mask, and tasks of lm-eval from a folder of our own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.sampling.reference import EOS, MASK, block_mask, logits, tiny
from tests.sampling.words import START, word_tokenizer
from unmask import sample
from unmask.cli import main, say
from unmask.errors import UserError
from unmask.evaluation import Asked, evaluate_tasks, log_likelihoods, tasks
from unmask.models import RowModel
from unmask.objectives import build
from unmask.runs.open import OpenModel
from unmask.sampling import Options, opening

PAIRS = [([1, 2, 3], [4, 5]), ([7, 8, 9, 10, 11], [12]), ([1], [2, 3, 4, 5, 6, 7])]


def bound_to(name: str, **options):
    return build(name, options).model_copy(update={"mask_token_id": MASK})


def causal_nats(twin, context, continuation) -> float:
    """log p of the continuation's tokens, one after the other."""
    token = [*context, *continuation]
    mask = torch.ones(len(token), len(token)).tril().bool()
    found = logits(twin, token, list(range(len(token))), {"full_attention": mask}).log_softmax(-1)
    return sum(found[place - 1, token[place]].item() for place in range(len(context), len(token)))


def masked_nats(twin, token, masked, size: int) -> float:
    """log p of the masked places of the last block of `size` (0: the whole text, no clean rows), given the rest.

    The mask token itself is never predicted (SUBS).
    """
    start = (len(token) - 1) // size * size if size else 0
    noisy = [MASK if place in masked else token[place] for place in range(start, len(token))]
    rows = [*token[:start], *noisy]
    mask = block_mask(start, start, len(token), max(size, 1))
    found = logits(twin, rows, list(range(len(rows))), {"full_attention": mask})
    found[:, MASK] = -torch.inf
    found = found.log_softmax(-1)
    return sum(found[place, token[place]].item() for place in masked)


def test_an_autoregressive_likelihood_is_exact_whatever_the_draws():
    model, twin = tiny(seed=3)
    found = log_likelihoods(RowModel(model), bound_to("ar"), PAIRS, draws=7)
    np.testing.assert_allclose(found, [causal_nats(twin, *pair) for pair in PAIRS], rtol=1e-10)


@pytest.mark.parametrize(("name", "size"), [("mdlm", 0), ("block_diffusion", 4)])
def test_a_diffusion_likelihood_is_the_estimate_over_masks_of_the_continuation(name, size):
    """One token: exact, the rest of its block or text beside it. Two: half of k=1 (weight 2) and half of k=2."""
    model, twin = tiny(seed=3)
    objective = bound_to(name, **({"block_size": size} if size else {}))
    one, two = [9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6]
    found = log_likelihoods(RowModel(model), objective, [(one[:5], one[5:]), (two[:4], two[4:])], draws=256)
    assert found[0] == pytest.approx(masked_nats(twin, one, [5], size), rel=1e-10)
    single = [2 * masked_nats(twin, two, [place], size) for place in (4, 5)]
    both = masked_nats(twin, two, [4, 5], size)
    # 128 of 256 draws take one of the two singles at random.
    error = abs(single[0] - single[1]) / 4 / np.sqrt(128)
    assert found[1] == pytest.approx((sum(single) / 2 + both) / 2, abs=4 * error + 1e-9)


@pytest.mark.parametrize("guidance", [0.0, 1.5])
def test_a_guided_likelihood_is_llada_s(guidance):
    """u + (w + 1)(c - u) with the prompt masked in u, of the one token that is scored: exact, in fp64."""
    model, twin = tiny(seed=3)
    token = [9, 8, 7, 6, 5, 4]

    def last(rows):
        found = logits(twin, rows, list(range(len(rows))), {"full_attention": torch.ones(6, 6).bool()})[-1]
        return found.double()

    given, without = last([*token[:5], MASK]), last([MASK] * 6)
    mixed = without + (guidance + 1) * (given - without)
    mixed[MASK] = -torch.inf
    wanted = mixed.log_softmax(-1)[token[-1]].item()
    for objective in (bound_to("mdlm"), bound_to("block_diffusion", block_size="full")):
        found = log_likelihoods(RowModel(model), objective, [(token[:5], token[5:])], draws=3, guidance=guidance)
        assert found[0] == pytest.approx(wanted, rel=1e-9)
    # Of more tokens: both passes are masked alike, and without a prompt guidance changes nothing.
    alone = [log_likelihoods(RowModel(model), bound_to("mdlm"), [([], token)], draws=4, guidance=w) for w in (0.0, 2.0)]
    np.testing.assert_allclose(*alone, rtol=1e-9)


def test_guidance_of_a_command_reaches_the_likelihoods_of_its_tasks(folder, monkeypatch):
    model, _ = tiny(seed=3)
    found = OpenModel(model, word_tokenizer(), MASK, bound_to("mdlm"))
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    asked = Asked(["choose"], include_path=folder(["", "", ""]), draws=2)
    assert set(evaluate_tasks("folder", asked, Options(guidance=1.5))["tasks"]) == {"choose"}
    from unmask.evaluation.harness import UnmaskLM

    guided = UnmaskLM(found, draws=2, guidance=1.5)._log_likelihoods(PAIRS)
    wanted = log_likelihoods(RowModel(model), found.objective, PAIRS, draws=2, guidance=1.5)
    np.testing.assert_allclose(guided, wanted, rtol=1e-12)
    assert not np.allclose(guided, log_likelihoods(RowModel(model), found.objective, PAIRS, draws=2))


def test_guidance_of_a_model_that_sees_no_whole_sequence_is_refused():
    model, _ = tiny(seed=3)
    with pytest.raises(UserError, match="guidance=1: a likelihood is guided for models over whole sequences"):
        log_likelihoods(RowModel(model), bound_to("block_diffusion", block_size=4), PAIRS, guidance=1.0)


def test_a_likelihood_depends_on_nothing_else_that_is_asked():
    model, _ = tiny(seed=3)
    objective = bound_to("block_diffusion", block_size=4)
    together = log_likelihoods(RowModel(model), objective, PAIRS, seed=2, draws=3)
    alone = [log_likelihoods(RowModel(model), objective, [pair], seed=2, draws=3)[0] for pair in reversed(PAIRS)]
    np.testing.assert_allclose(together, alone[::-1], rtol=1e-10)
    assert abs(together - log_likelihoods(RowModel(model), objective, PAIRS, seed=3, draws=3)).max() > 1e-3


DOCS = [("w1 w2", ["w3", "w4", "w5"], 0), ("w6 w7 w8", ["w9", "w10", "w11"], 2), ("w20", ["w21", "w22", "w23"], 1)]
COMMON = """
dataset_path: json
test_split: test
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
doc_to_text: "{{{{question}}}}"
"""
KINDS = {
    "choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
""",
    "say": """
output_type: loglikelihood
doc_to_target: " {{choices[gold]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
    "write": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["w0 w0"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def folder(tmp_path):
    """A task of every kind over the same three questions, whose answers `given` fills in."""

    def filled(answers):
        records = [
            {"question": text, "choices": choices, "gold": gold, "answer": answer}
            for (text, choices, gold), answer in zip(DOCS, answers, strict=True)
        ]
        (tmp_path / "docs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for name, text in KINDS.items():
            common = COMMON.format(data=tmp_path / "docs.jsonl", cache=tmp_path / "cache")
            if name == "roll":
                common = common.replace("{{question}}", "")
            (tmp_path / f"{name}.yaml").write_text(f"task: {name}{common}{text}")
        return tmp_path

    return filled


@pytest.fixture(params=["ar", "block_diffusion"])
def opened(request, monkeypatch):
    model, twin = tiny(seed=6)
    options = {} if request.param == "ar" else {"block_size": 4}
    found = OpenModel(model, word_tokenizer(), MASK, bound_to(request.param, **options))
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    return found, twin


def ids(words: str) -> list[int]:
    return [int(word[1:]) for word in words.split()]


def test_every_kind_of_task_gives_what_the_model_says(opened, folder):
    """Scores recomputed from likelihoods (of SDPA for ar) and samples of single texts."""
    found, twin = opened
    options = {"length": 4} | ({} if found.objective.decoding.kind == "causal" else {"block_size": 2})
    texts = [sample(found.model, found.tokenizer, text, decoding=found.objective.decoding, **options).text
             for text, *_ in DOCS]  # fmt: skip
    path = folder([texts[0], "w30 w30", texts[2]])
    causal = found.objective.decoding.kind == "causal"
    asked = Asked(["choose", "say", "roll", "write"], include_path=path, draws=None if causal else 6, seed=5)
    got = evaluate_tasks("run", asked, Options.parse(options, "sample"))

    def nats(context, continuation):
        if causal:
            return causal_nats(twin, context, continuation)
        pairs = [(context, continuation)]
        return log_likelihoods(RowModel(found.model), found.objective, pairs, seed=5, draws=6)[0]

    right, golds, greedy = [], [], []
    for text, choices, gold in DOCS:
        values = [nats(ids(text), ids(choice)) for choice in choices]
        right.append(int(np.argmax(values)) == gold)
        golds.append(values[gold])
        written = sample(found.model, None, ids(text), decoding=found.objective.decoding, length=1)
        greedy.append(written.token == ids(choices[gold]))
    results = got["tasks"]
    assert results["choose"]["acc"] == pytest.approx(np.mean(right))
    assert results["say"]["perplexity"] == pytest.approx(np.exp(-np.mean(golds)), rel=1e-9)
    assert results["say"]["acc"] == pytest.approx(np.mean(greedy))
    whole = [nats([EOS], ids(text)) for text, *_ in DOCS]
    words = sum(len(text.split()) for text, *_ in DOCS)
    assert results["roll"]["word_perplexity"] == pytest.approx(np.exp(-sum(whole) / words), rel=1e-9)
    assert results["write"]["exact_match"] == pytest.approx(2 / 3)
    assert got["examples"] == dict.fromkeys(KINDS, 3) and got["draws"] == (None if causal else 6)
    lines = say.tasks(got).splitlines()
    assert lines[0].split() == ["task", "examples", "metric", "value", "standard", "error"]
    assert any(line.split()[:4] == ["write", "3", "exact_match", "0.6667"] for line in lines)


@pytest.mark.parametrize("opened", ["block_diffusion"], indirect=True)
def test_the_greedy_answer_is_written_one_token_at_a_time(opened):
    from unmask.evaluation.harness import UnmaskLM

    found, _ = opened
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    options = {"decoding": found.objective.decoding, "length": 5, "strategy": "low_confidence"}
    written = [sample(found.model, None, prompt, **options).token for prompt in prompts]
    model = UnmaskLM(found)
    assert model._encode_pair("w1 w2", " w3") == ([1, 2], [3])
    assert model._encode_pair("w1 w2", "w3") == ([1, 2], [3])  # "w2w3" is one unknown word
    pairs = [*zip(prompts, written, strict=True), (prompts[0], written[1]), (prompts[1], [])]
    assert model._greedy(pairs) == [True, True, False, True]


@pytest.mark.parametrize("opened", ["block_diffusion"], indirect=True)
def test_texts_begin_with_the_tokenizers_beginning_token(opened, monkeypatch):
    """Once, an empty context is that token, and what is cut off a long context leaves it."""
    from lm_eval.api.instance import Instance

    from unmask.evaluation.harness import UnmaskLM

    found, _ = opened
    found.tokenizer.bos_token, found.tokenizer.add_bos_token = "<|start|>", True
    model = UnmaskLM(found)
    assert model.tok_encode("w1") == [START, 1] == model.tok_encode("<|start|> w1")
    assert model._encode_pair("w1 w2", " w3") == ([START, 1, 2], [3])
    assert model._encode_pair("w1 w2", "w3") == ([START, 1, 2], [3])
    asked: list[Any] = []
    monkeypatch.setattr(model, "_loglikelihood_tokens", lambda requests, **_: asked.extend(requests) or [])
    model.loglikelihood([Instance("loglikelihood", {}, ("", "w3 w4"), 0, ("task", 0, 1))])
    assert asked == [(("", "w3 w4"), [START], [3, 4])]
    pairs: list[Any] = []
    monkeypatch.setattr(model, "_log_likelihoods", lambda given: pairs.extend(given) or [0.0] * len(given))
    model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("w3 w4",), 0, ("task", 0, 1))])
    assert pairs == [([START], [3, 4])]
    monkeypatch.setattr(type(model), "max_length", 6)
    assert model._fitting([START, 1, 2, 3, 4], [5, 6]) == ([START, 2, 3, 4], [5, 6])
    assert model._prompt("w1 w2 w3 w4", 3) == [START, 3, 4]
    chat = model.apply_chat_template([{"role": "user", "content": "w1"}])
    assert model.tok_encode(chat) == found.tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1"}], add_generation_prompt=True, return_dict=False
    )
    found.tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert model.tok_encode(model.apply_chat_template([{"role": "user", "content": "w1"}])) == [1]


@pytest.mark.parametrize("opened", ["block_diffusion"], indirect=True)
def test_the_command_line(opened, folder, monkeypatch, capsys):
    path = folder(["w1", "w1", "w1"])

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["unmask", "eval", "run", *map(str, arguments)])
        try:
            main()
        except SystemExit as error:
            return error.code, capsys.readouterr()
        return 0, capsys.readouterr()

    own = ["--include-path", path]
    code, printed = run("--tasks", "write", *own, "--limit", 2, "--apply-chat-template", "--json", "length=3")
    assert code == 0 and json.loads(printed.out)["examples"] == {"write": 2}
    for arguments, told in [
        ((), "eval takes one of --data PATH, --generate FILE and --tasks NAME,...; it was given none"),
        (("--tasks", "write", "--data", "x"), "it was given --data and --tasks"),
        (("--tasks", "wrte", *own), "--tasks wrte: no such task (did you mean 'write'?)"),
        (("--tasks", "write", *own, "--levels", 3), "--levels is for --data, not for --tasks"),
        (("--tasks", "write", "--include-path", path / "none"), "no such folder of task files"),
        (("--tasks", "write", *own, "num_samples=2", "temperature=1"), "num_samples=2 has no effect here"),
        (("--tasks", "choose", *own, "length=3"), "length=3 has no effect here: --tasks choose compares likelihoods"),
        (("--tasks", "write", *own, "--draws", 3), "--draws 3 has no effect here: --tasks write compares no likel"),
        (("--data", "x", "length=3"), "length=3: options of the sampler are for --generate and --tasks"),
    ]:
        code, printed = run(*arguments)
        assert code == 2 and told in printed.err and printed.err.count("\n") == 1
    code, printed = run("--tasks", "write", *own, "--num-fewshot", 5)  # of three examples
    told = "unmask: --tasks write: lm-eval cannot run it with --num-fewshot 5: Sample larger than population"
    assert code == 2 and printed.err.splitlines()[-1].startswith(told) and "Traceback" not in printed.err
    (path / "broken.yaml").write_text("task: broken\ndataset_path: json\noutput_type: generate_until\n"
                                      f"dataset_kwargs: {{data_files: {{test: {path}/none.jsonl}}}}\n")  # fmt: skip
    code, printed = run("--tasks", "broken", *own)
    assert code == 2 and "--tasks broken: lm-eval cannot load it: " in printed.err
    (path / "broken.yaml").write_text("task: broken\n metric_list: [\n")
    code, printed = run("--tasks", "broken", *own)
    assert code == 2 and f"{path}/broken.yaml cannot be read as YAML: " in printed.err
    assert printed.err.count("\n") == 1
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    code, printed = run("--tasks", "write", *own)
    assert (code, printed.err) == (2, "unmask: --tasks needs lm-eval: pip install 'unmask[lm-eval]'\n")


def test_what_cannot_be_asked_is_refused(folder, monkeypatch):
    path = folder(["w1", "w1", "w1"])
    model, _ = tiny()
    found = OpenModel(model, word_tokenizer(), MASK, bound_to("ar"))
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found._replace(tokenizer=None))
    with pytest.raises(UserError, match="^runs/a: has no tokeniser, and tasks are texts$"):
        evaluate_tasks("runs/a", Asked(["say"], include_path=path))
    monkeypatch.setattr(opening, "open_model", lambda path, **options: found)
    with pytest.raises(UserError, match="--draws 4 has no effect: an autoregressive model's likelihood is exact"):
        evaluate_tasks("run", Asked(["say"], include_path=path, draws=4))
    (path / "odd.yaml").write_text((path / "write.yaml").read_text().replace("task: write", "task: odd")
                                   .replace("do_sample: false", "num_beams: 4"))  # fmt: skip
    with pytest.raises(UserError, match="generation_kwargs.num_beams, which unmask's samplers do not have"):
        evaluate_tasks("run", Asked(["odd"], include_path=path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="eval --tasks runs in one process: start it without torchrun"):
        evaluate_tasks("run", Asked(["say"], include_path=path))
