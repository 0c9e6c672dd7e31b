"""Entropy-bound sampling is transformers' `generate`, under the same random numbers; a folder is sampled."""

from __future__ import annotations

import json

import pytest
import torch

from tests.models.diffusion_gemma import objective, stock, tiny
from tests.sampling.words import word_tokenizer
from unmask.errors import UserError
from unmask.evaluation import generate
from unmask.export import export
from unmask.sampling import Options, sample
from unmask.sampling.diffusion_gemma import Sampler, within
from unmask.sampling.opening import session as session_of

PROMPT = [5, 9, 33, 20, 7, 41, 12, 8, 3]


@pytest.fixture(scope="module")
def model():
    found = tiny().eval()
    with torch.no_grad():  # sharper: some canvases settle before the last step, some tokens are accepted early
        found.get_input_embeddings().weight.mul_(3.0)
    return found


@pytest.fixture(scope="module")
def twin(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder)
    return stock(folder)


def generated(twin, seed, **options):
    torch.manual_seed(seed)
    out = twin.generate(torch.tensor([PROMPT]), **options).sequences[0, len(PROMPT) :].tolist()
    return out


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_transformers_generate(seed, cache, model, twin):
    theirs = generated(twin, seed, max_new_tokens=12, max_denoising_steps=20, eos_token_id=None)
    decoding = objective(model).decoding
    found = sample(model, None, PROMPT, decoding=decoding, length=12, steps=20, seed=seed, cache=cache)
    assert found.token == theirs and len(set(theirs)) > 2


def test_samples_sampled_together_are_those_sampled_alone_and_end_tokens_end(model, twin):
    decoding = objective(model).decoding
    options = {"decoding": decoding, "length": 10, "steps": 8}
    together = sample(model, None, [PROMPT, PROMPT[:5]], num_samples=2, **options)
    assert [len(each.token) for each in together] == [10] * 4
    alone = [sample(model, None, prompt, seed=seed, **options) for prompt in (PROMPT, PROMPT[:5]) for seed in (0, 1)]
    assert [each.token for each in together] == [each.token for each in alone]
    end = together[0].token[5]
    stopped = sample(model, None, PROMPT, end_tokens=[end], **options).token
    assert stopped == together[0].token[: together[0].token.index(end)]
    theirs = generated(twin, 0, max_new_tokens=12, max_denoising_steps=8, eos_token_id=end, pad_token_id=0)
    assert theirs[: theirs.index(end)] == stopped


def test_the_bound_and_the_settings_of_a_folder(model):
    accepted = within(torch.tensor([0.5, 0.04, 0.2, 0.05]), 0.1)
    assert accepted.tolist() == [False, True, True, True]  # 0.04, 0.09 and 0.29, each without itself
    model.generation_config.t_max, model.generation_config.max_denoising_steps = 0.9, 7
    try:
        assert Sampler.of(model) == Sampler(steps=7, high=0.9)
    finally:
        model.generation_config.t_max = model.generation_config.max_denoising_steps = None


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperature": 0.5}, "temperature=0.5 has no effect here"),
        ({"strategy": "margin"}, "strategy='margin' has no effect here"),
        ({"suffix": [4, 5]}, "sees nothing to the right"),
    ],
)
def test_what_plays_no_part_is_refused(options, said, model):
    with pytest.raises(UserError, match=said):
        sample(model, None, PROMPT, decoding=objective(model).decoding, **options)


def test_a_published_folder_is_sampled_and_evaluated_before_any_training(model, tmp_path):
    model.save_pretrained(tmp_path / "hf")
    word_tokenizer().save_pretrained(tmp_path / "hf")
    assert "unmask" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    session = session_of(tmp_path / "hf", ["length=6", "steps=3"])
    assert (session.method, session.decoding.block_size) == ("canvas", 4)
    [work] = session.works([PROMPT], [None])
    list(session.batches([work]))
    truth = sample(model, word_tokenizer(), PROMPT, decoding=objective(model).decoding, length=6, steps=3)
    assert work.canvas.answer() == truth.token
    questions = tmp_path / "held-out.jsonl"
    questions.write_text(json.dumps({"messages": [{"role": "user", "content": "w1 w2"}], "response": "w3"}) + "\n")
    found = generate(tmp_path / "hf", questions, Options.read(["length=6", "steps=3"]))
    assert found["records"] == 1 and found["passes"] > 0
    with pytest.raises(UserError, match="preset=llada .method=full. does not fit this model, .* use method=canvas$"):
        session_of(tmp_path / "hf", ["preset=llada"])


def test_a_trained_folder_is_exported_and_sampled(tmp_path):
    from safetensors.torch import load_file

    from tests.models.diffusion_gemma_config import CONFIG
    from tests.parallel.trainer_cases import documents
    from tests.training.tiny import train

    trainer = train(tmp_path / "run", objective={"name": "diffusion_gemma"}, model=CONFIG, data=documents("prompt"))
    export(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["DiffusionGemmaForBlockDiffusion"] and "mask_token_id" not in config
    kept = load_file(tmp_path / "hf" / "model.safetensors")
    for name, weight in trainer.run.model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(kept[name], weight), name
    assert generated(stock(tmp_path / "hf", "float32"), 1, max_new_tokens=4, max_denoising_steps=3)
    for folder in ("run", "hf"):
        session = session_of(tmp_path / folder, ["length=6", "steps=3"])
        [work] = session.works([PROMPT], [None])
        list(session.batches([work]))
        assert len(work.canvas.answer()) <= 6
