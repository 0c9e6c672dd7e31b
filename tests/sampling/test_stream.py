"""Finished blocks, one after the other: their texts make the sample's, and nothing that is shown changes later."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.reference import EOS, tiny
from tests.sampling.test_drivers import Stub
from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling import Fill, Noisy, sample, samplers, stream

BLOCK = Decoding("block", 4, False)


class Bytes(Stub):
    """Tokens are bytes of UTF-8; 0 and 1 are the two halves of an e with an acute accent."""

    def decode(self, token):
        return bytes({0: 0xC3, 1: 0xA9}.get(t, 97 + t % 26) for t in token).decode(errors="replace")


@pytest.mark.parametrize(
    "decoding, sizes",
    [
        (BLOCK, [1, 4, 4, 4]),  # a prompt of three leaves one place in its block
        (Decoding("full", None, False), [13]),
        (Decoding("causal", None, True), [1] * 13),
    ],
    ids=["block", "full", "causal"],
)
def test_pieces_are_the_sample(decoding, sizes):
    model, _ = tiny()
    options = {"decoding": decoding, "length": 13}
    whole = sample(model, Bytes(), [5, 6, 7], **options)
    assert EOS not in whole.token
    found = list(stream(model, Bytes(), [5, 6, 7], **options))
    assert [len(piece.token) for piece in found] == sizes
    assert [token for piece in found for token in piece.token] == whole.token
    assert "".join(piece.text for piece in found) == whole.text


def test_a_block_is_handed_out_before_the_next_is_begun():
    model, _ = tiny()
    pieces = stream(model, None, [5] * 4, decoding=BLOCK, length=8, threshold=1.0)
    first = next(pieces)
    rest = list(pieces)
    whole = sample(model, None, [5] * 4, decoding=BLOCK, length=8, threshold=1.0)
    assert first.token == whole.token[:4] and [piece.token for piece in rest] == [whole.token[4:]]


def test_a_character_cut_by_a_block_is_shown_whole():
    def halves(canvas, decoding, options):
        for place in range(canvas.start, canvas.stop):
            canvas.fill(torch.tensor([place]), torch.tensor([place % 2]))
            canvas.done = place + 1
            yield Noisy(0, place + 1, torch.tensor([place]))

    samplers.add("halves", halves)
    model, _ = tiny()
    found = list(stream(model, Bytes(), [5, 6], decoding=BLOCK, length=4, method="halves"))
    assert [piece.text for piece in found] == ["", "é", "", "é"]
    assert [len(piece.token) for piece in found] == [1, 1, 1, 1]


def test_the_end_token_ends_it():
    model, _ = tiny()
    with torch.no_grad():
        model.lm_head.weight[EOS] += 40 * torch.sign(model.lm_head.weight[EOS])
    for seed in range(6):
        whole = sample(model, Stub(), [seed, 2, 3], decoding=BLOCK, length=32)
        pieces = list(stream(model, Stub(), [seed, 2, 3], decoding=BLOCK, length=32))
        assert [token for piece in pieces for token in piece.token] == whole.token


def test_holes_are_numbered():
    model, _ = tiny()
    text = Fill(([1, 2], [3], []), (5, 4))
    whole = sample(model, None, text, decoding=BLOCK)
    found = list(stream(model, None, text, decoding=BLOCK))
    for number, hole in enumerate(whole.holes):
        assert [token for piece in found if piece.hole == number for token in piece.token] == hole.token
    assert [piece.hole for piece in found] == sorted(piece.hole for piece in found)


def test_several_cannot_be_one_stream():
    model, _ = tiny()
    with pytest.raises(UserError, match="stream: it takes one prompt"):
        stream(model, None, [[1], [2]], decoding=BLOCK)
    with pytest.raises(UserError, match="stream: it takes one prompt"):
        stream(model, None, [1], decoding=BLOCK, num_samples=2, temperature=1.0)
