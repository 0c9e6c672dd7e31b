"""Arguments of the Python functions that are of the wrong kind: one sentence each, and nothing is written."""

import pytest
import torch

from tests.sampling.reference import tiny
from tests.training.tiny import config, documents
from unmask import Config, Trainer, load, sample
from unmask.data import prepare
from unmask.errors import UserError
from unmask.evaluation import evaluate
from unmask.export import export
from unmask.objectives import Decoding

BLOCK = Decoding("block", 4, False)
CAUSAL = Decoding("causal", None, True)


def trained(path, *data, **options):
    Trainer(config=config(path)).train(*(data or [documents()]), **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda path: Trainer(config={"training": {"steps": 1}}), "config is a Config, not {'training'"),
        (lambda path: Trainer(config="run.yaml"), "not 'run.yaml'; make one with Config.load(path) or Config.parse"),
        (lambda path: Trainer(parallel_config={}), "parallel_config is a ParallelConfig, not {}"),
        (lambda path: Trainer(3), "the path of a model (model_name) is text or a pathlib.Path, not 3"),
        (lambda path: Trainer(checkpoint_path=3), "the path of a run (checkpoint_path) is text"),
        (lambda path: Trainer(callbacks=print), "callbacks is a list of functions and unmask.Callback objects"),
        (lambda path: Trainer(checkpoint_path="").train(documents()), "checkpoint.path=''"),
        (lambda path: Trainer(checkpoint_path=path).train(documents()), "give model.name (a folder or .gguf file)"),
        (lambda path: Trainer(checkpoint_path=path).train(), "nothing to train on"),
        (lambda path: trained(path, epochs="x"), "training.epochs='x'"),
        (lambda path: trained(path, epochs=float("inf")), "training.epochs=inf"),
        (lambda path: trained(path, batch_size=True), "training.batch_size: True is no number"),
        (lambda path: trained(path, 3), "training data is a path, a dataset or a list of texts or records, not int"),
        (lambda path: load(None), "the path of a run, a step or an exported model is text or a pathlib.Path, not None"),
        (lambda path: load(path / "missing"), "missing: no such checkpoint folder"),
        (lambda path: load(path, device="gpu"), "device=gpu: nothing can be put there"),
        (lambda path: load(path, dtype="float3"), "dtype=float3: not a dtype of weights"),
        (lambda path: Config.load(None), "the path of a config file is text"),
        (lambda path: evaluate(path, "x", draws=0), "evaluate: draws=0"),
        (lambda path: evaluate(path, "x", pack_tokens=1), "evaluate: pack_tokens=1"),
        (lambda path: export(path, None), "the path of the folder to export to is text"),
        (lambda path: prepare("text", None, None), "the path of the dataset to write is text"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_a_sentence(tmp_path, monkeypatch, call, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        call(tmp_path / "run")
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decoding": "block"}, "decoding is the objective's, load(folder).objective.decoding, not 'block'"),
        ({"decoding": ("block", 4, False)}, "decoding is the objective's"),
        ({"length": 0}, "length=0: "),
        ({"length": -1}, "length=-1: "),
        ({"length": "x"}, "length='x': "),
        ({"temperature": float("nan")}, "temperature=nan: "),
        ({"prompt": None}, "text or a list of token ids, not None"),
        ({"prompt": 5}, "text or a list of token ids, not 5"),
        ({"prompt": [1.5]}, "text or a list of token ids, not [1.5]"),
        ({"prompt": "text"}, "this model has no tokeniser"),
        ({"suffix": 4}, "text or a list of token ids, not 4"),
        ({"model": None}, "the model is one of transformers, such as load(folder).model, not None"),
        ({"model": tiny()[0].model}, "Qwen3Model has no output projection"),
        ({"prompt": [[1], "text"]}, "this model has no tokeniser"),
        ({"prompt": [[1], None]}, "prompt 2: sample: a prompt or suffix is text or a list of token ids, not None"),
        ({"strategy": "sure"}, "unknown strategy 'sure'"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect here: it needs a temperature above 0"),
        ({"decoding": CAUSAL, "threshold": 0.5}, "threshold=0.5 has no effect here"),
        ({"decoding": CAUSAL, "block_size": 8}, "block_size=8 has no effect here"),
    ],
)
def test_sample_refuses_in_a_sentence(options, sentence):
    arguments = {"model": tiny()[0], "tokenizer": None, "prompt": [1], "decoding": BLOCK, **options}
    with pytest.raises(UserError) as error:
        sample(**arguments)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_ids_may_come_in_a_tensor_and_an_empty_text_needs_no_tokeniser():
    model, _ = tiny()
    options = {"decoding": BLOCK, "length": 3}
    assert sample(model, None, torch.tensor([1, 2]), **options).token == sample(model, None, [1, 2], **options).token
    assert len(sample(model, None, "", **options).token) == 3
