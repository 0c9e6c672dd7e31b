"""Run folders of the wrong shape: one sentence each, and a good checkpoint goes on whatever lies damaged beside it."""

import json

import pytest

from tests.training.tiny import config, documents, log, losses, train
from unmask.errors import UserError
from unmask.runs import folder as layout
from unmask.runs import record
from unmask.runs.compare import compare
from unmask.runs.mending import mend
from unmask.runs.open import open_model
from unmask.runs.resume import continued
from unmask.training import own_objective
from unmask.training.trainer import Trainer

DEEP = "[" * 10_000


class Told(Trainer):
    """Keeps what it says."""

    def message(self, text):
        self.said = [*getattr(self, "said", []), text]


def go_on(path, *overrides):
    trainer = Told(config=config(path, *overrides))
    trainer.train(documents())
    return trainer.said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    return train(path, "training.steps=3", "checkpoint.every=2", "checkpoint.keep=0")


def altered(tree):
    """The tree with, one at a time, each value replaced by ones of another kind and each key left out."""
    for key, value in tree.items():
        if key == "exact":  # of which any alteration is refused
            continue
        yield {name: each for name, each in tree.items() if name != key}
        for other in ([], {}, "x", 1e30):
            if type(other) is not type(value):
                yield tree | {key: other}
        if isinstance(value, dict):
            yield from (tree | {key: inner} for inner in altered(value))


def refused(call, *ours):
    """1 where `call` is refused in one sentence about one of `ours`; anything but a UserError is a fault."""
    try:
        call()
    except UserError as error:
        assert "\n" not in str(error) and any(str(each) in str(error) for each in ours), error
        return 1
    return 0


def test_a_record_of_another_shape_is_one_sentence(finished, tmp_path):
    file = tmp_path / "run" / "run.json"
    file.parent.mkdir()
    (file.parent / "config.yaml").write_text((finished.run.path / "config.yaml").read_text())
    own = json.loads((finished.run.path / "run.json").read_text())
    own["starts"][0] |= {"config": {}, "exact": {}, "machine": {}, "versions": {"torch": "1"}, "git": {}}
    starts = [{"starts": [each]} for each in altered(own["starts"][0])]
    count = 0
    for tree in [*starts, *altered(own), [], None, "x"]:
        file.write_text(json.dumps(tree))
        count += refused(lambda: record.again(file.parent, ["data.train=x"]), file, file.parent)
    assert count > 40
    for text in ("", DEEP, '{"starts": ' + DEEP, "\udcff".encode("utf-8", "surrogatepass").decode("latin-1")):
        file.write_text(text)
        assert refused(lambda: record.again(file.parent), file)


def test_a_state_of_another_shape_is_one_sentence(finished):
    """With a manifest that fits it, which anybody can write."""
    trainer, finished = finished, finished.run.path
    folder = finished / "step-00000003"
    file, manifest = folder / "state.json", folder / "manifest.json"
    own, signed = file.read_text(), manifest.read_text()
    count = 0
    try:
        for tree in [*altered(json.loads(own)), [], None]:
            file.write_text(json.dumps(tree))
            manifest.write_text(json.dumps({"files": {"state.json": layout.describe(folder)["state.json"]}}))
            count += refused(
                lambda: trainer.saving.restore(continued(trainer.run.identity), trainer.objective), file, folder
            )
            refused(lambda: own_objective._own(str(finished)), file, folder)
        for text in ("", DEEP, '{"step": ' + DEEP):
            file.write_text(text)
            manifest.write_text(json.dumps({"files": {"state.json": layout.describe(folder)["state.json"]}}))
            assert refused(lambda: open_model(finished), file)
        manifest.write_text(DEEP)
        assert refused(lambda: open_model(finished), manifest)
    finally:
        file.write_text(own)
        manifest.write_text(signed)
    assert count > 40


def test_a_log_of_another_shape_is_one_sentence(finished, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((finished.run.path / "config.yaml").read_text())
    step = log(finished.run.path)[0]
    evaluation = {"kind": "evaluation", "step": 2, "steps": 3, "nats_per_token": 2.0}
    count = 0
    for line in [*altered(step), *altered(evaluation), [], None, "x"]:
        (run / "log.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(line) + "\n")
        count += refused(lambda: compare([run, run]), run / "log.jsonl")
    assert count > 40
    (run / "log.jsonl").write_text(DEEP + "\n")
    assert refused(lambda: compare([run, run]), f"{run / 'log.jsonl'}:1")


def test_a_good_checkpoint_goes_on_beside_damage(tmp_path):
    train(tmp_path, "training.steps=3")
    whole = losses(tmp_path)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    damaged = "\n".join([lines[0], lines[1][:20], DEEP, lines[2], ""])
    (tmp_path / "log.jsonl").write_text(damaged)
    (tmp_path / "run.json").write_text("{oops")
    said = go_on(tmp_path, "training.steps=4")
    assert (
        f"{tmp_path / 'run.json'} was damaged: it is kept as run.json.damaged, and a new one begins with this start"
        in said
    )
    lost = "2 and 1 more was damaged: the log continues without it, and is kept as log.jsonl.damaged"
    assert f"{tmp_path / 'log.jsonl'}:{lost}" in said
    assert (tmp_path / "log.jsonl.damaged").read_text() == damaged
    assert (tmp_path / "run.json.damaged").read_text() == "{oops"
    assert [pair for pair in losses(tmp_path) if pair[0] < 4] == [whole[0], whole[2]]
    assert [start["step"] for start in record.read(tmp_path / "run.json")] == [3]
    (tmp_path / "run.json").write_text("[]")
    go_on(tmp_path, "training.steps=5")
    assert (tmp_path / "run.json.damaged-2").read_text() == "[]"


@pytest.mark.parametrize(
    "steps, after, every, told",
    [
        ([1, 2, 3], 3, 1, ""),
        ([10, 20, 30], 35, 10, ""),
        ([10, 20, 30], 35, 1, ""),  # it was logged less often before
        ([10, 20], 35, 10, "ends at step 20, and the run is resumed after 35: the steps between are lost"),
        ([], 3, 1, "ends at step 0, and the run is resumed after 3: the steps between are lost"),
        ([], 3, 10, ""),
        ([1, 2], 0, 1, ""),
    ],
)
def test_a_gap_is_told(tmp_path, steps, after, every, told):
    (tmp_path / "run.json").write_text('{"starts": []}')
    (tmp_path / "log.jsonl").write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in steps))
    said = [note for note in mend(tmp_path, after, every) if "log.jsonl" in note]
    assert said == ([f"{tmp_path / 'log.jsonl'} {told}"] if told else [])


def test_a_run_that_goes_on_after_its_end_keeps_its_last_evaluation(tmp_path):
    held_out = documents(4, seed=1)
    train(tmp_path, "training.steps=2", "evaluation.packs=2", validation=held_out)
    before = log(tmp_path)
    assert [each["kind"] for each in before] == ["step", "step", "evaluation"]
    train(tmp_path, "training.steps=3", "evaluation.packs=2", validation=held_out)
    assert log(tmp_path)[:3] == before
    assert [(each["kind"], each["step"]) for each in log(tmp_path)[3:]] == [("step", 3), ("evaluation", 3)]
