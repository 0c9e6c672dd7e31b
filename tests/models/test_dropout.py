"""A model's own dropout and router noise: switched off and told of, or refused by name."""

import pytest
import torch

from tests.models.test_load import SHAPE
from tests.training.tiny import documents, losses, train, weights
from unmask.config import ModelConfig
from unmask.errors import UserError
from unmask.models import dropout, load

ASKING = {
    "starcoder2": {"attention_dropout": 0.1, "residual_dropout": 0.3, "embedding_dropout": 0.2},
    "phi": {"resid_pdrop": 0.3, "embd_pdrop": 0.2},
    "mixtral": {"router_jitter_noise": 0.5, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def stored(kind, folder, **changes):
    """A folder of a model whose config.json asks for it, as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SHAPE, **ASKING[kind], **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ASKING)
def test_a_pass_in_training_is_one_in_evaluation(kind, tmp_path):
    from tests.attention.full import FULL

    model = load(ModelConfig(name=str(stored(kind, tmp_path)), mask_token_id=39)).model
    token = torch.arange(12)[None]

    def hidden():
        return model.base_model(input_ids=token, plan=FULL, use_cache=False).last_hidden_state

    with torch.no_grad():
        evaluated, trained, again = model.eval() and hidden(), model.train() and hidden(), hidden()
    assert torch.equal(trained, evaluated) and torch.equal(again, evaluated)
    asked = {name: value for name, value in ASKING[kind].items() if not name.startswith("num")}
    assert dropout.asked_for(model.config) == asked  # what an export writes is what was read
    [note] = dropout.notes(model)
    assert all(f"{name}={value:g}" in note for name, value in asked.items()) and note.endswith("it is trained without")


def test_the_loss_is_a_function_of_the_seed_again(tmp_path):
    """Of micro-batches of one pack or two, which a generator's numbers would tell apart; and the run says so."""
    folder = stored("starcoder2", tmp_path / "model", hidden_act="silu")
    data = [{"input_ids": [token % 39 for token in each["input_ids"]]} for each in documents()]
    options = ["model.config=null", f"model.name={folder}", "model.mask_token_id=39", "model.dtype=float64"]
    said = []
    one = train(tmp_path / "one", *options, "training.micro_batch=1", data=data,
                callbacks=[lambda trainer, _: said.extend(trainer.run.notes())])  # fmt: skip
    two = train(tmp_path / "two", *options, "training.micro_batch=2", data=data)
    for (_, first), (_, second) in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert first == pytest.approx(second, rel=1e-12)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(two)[name], rtol=1e-9, atol=1e-12)
    assert any("attention_dropout=0.1" in note and "it is trained without" in note for note in said)


@pytest.mark.parametrize("kind", ASKING)
def test_a_configuration_of_the_user_s_is_refused(kind):
    name, value = next(iter(ASKING[kind].items()))
    with pytest.raises(UserError, match=rf"model.config.{name}={value}: unmask trains without it.*set it to 0"):
        load(ModelConfig(config={"model_type": kind, **SHAPE, **ASKING[kind]}))


def test_what_draws_by_other_means_is_refused(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) * torch.rand(()).sign())
    with pytest.raises(UserError, match="LlamaForCausalLM draws random numbers while it is trained"):
        load(ModelConfig(config={"model_type": "llama", **SHAPE}))
