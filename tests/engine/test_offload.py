"""Activations that wait in other memory: the same gradients, back in time, and the peak falls by what went away."""

import gc

import pytest
import torch

from tests.attention.test_interface import LAYERS, diffusion, gradients, run, tiny
from tests.planning.test_footprint import prepared
from unmask.attention import Plan
from unmask.engine.activations import apply
from unmask.engine.offload import InTurn, Offload
from unmask.errors import UserError
from unmask.planning.footprint import footprint


class Recorded(Offload):
    """Copies on the CPU. `did`: what was put away, wanted, set out and used, by number, in that order."""

    def __init__(self):
        super().__init__(self)
        self.did, self.numbers = [], {}

    def put(self, tensor):
        kept = super().put(tensor)
        self.numbers[id(kept.waiting)] = len(self.numbers)
        return kept

    def take(self, kept):
        self.did.append(("want", self.numbers[id(kept.waiting)]))
        return super().take(kept)

    def out(self, tensor):
        return tensor.clone()

    def back(self, waiting, device):
        number = self.numbers[id(waiting)]
        self.did.append(("back", number))

        def used():
            self.did.append(("use", number))
            return waiting.clone()

        return used


@pytest.mark.parametrize("mode, each", [("full", 1), ("selective", 3)])
def test_gradients_stay_and_what_is_wanted_next_is_on_its_way(mode, each):
    """Of a layer its input waits; with `selective` also attention's result and its log-sum-exp."""
    rows = diffusion([20, 7], 4)
    plan, plain, model = Plan.from_rows(rows), tiny(), tiny().train()
    expected = gradients(plain, run(plain, rows, plan))
    offload = Recorded()
    apply(model, mode, offload)
    hidden = run(model, rows, plan)
    assert offload.did == [] and len(offload.numbers) == each * LAYERS
    got = gradients(model, hidden)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    order = [number for what, number in offload.did if what == "use"]
    assert [number // each for number in order] == [layer for layer in range(LAYERS)[::-1] for _ in range(each)]
    for what in ("back", "use"):  # each comes back once
        assert sorted(number for did, number in offload.did if did == what) == list(range(each * LAYERS))
    for number in range(each * (LAYERS - 1)):  # on its way before it is wanted; the last layer's are wanted at once
        assert offload.did.index(("back", number)) < offload.did.index(("want", number))


def test_nothing_stays_behind():
    rows = diffusion([20], 4)
    model, offload = tiny().train(), Offload(InTurn())
    apply(model, "full", offload)
    gradients(model, run(model, rows, Plan.from_rows(rows)))
    gc.collect()
    assert offload._last() is None


def test_the_foretold_peak_falls_by_what_waits(tmp_path):
    """Of eight inputs, [rows, width] in fp32, two are there at a time; the meta device stands in for other memory.

    With two micro-batches, so that gradients are there from the start.
    """

    def activations(away):
        sizes = ["model.config.num_hidden_layers=8", "data.pack_tokens=512", "training.checkpointing=full"]
        run, micro = prepared(tmp_path, *sizes, "model.skip_last_layer=false")
        run.config.training.offload_activations = away  # refused on a CPU
        return footprint(run, micro, transfers=InTurn("meta")).activations, max(map(len, micro))

    (kept, rows), (left, _) = activations(False), activations(True)
    assert kept - left == pytest.approx((8 - 2) * rows * 32 * 4, rel=0.1)


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["training.checkpointing=full"], "no effect on a CPU"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(overrides, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        prepared(tmp_path, "training.offload_activations=true", *overrides)
