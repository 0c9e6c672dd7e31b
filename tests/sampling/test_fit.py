"""Every built-in sampler and preset on every decoding: it samples, or is refused in a sentence."""

from __future__ import annotations

import pytest

from tests.sampling.reference import MASK, tiny
from unmask.errors import UserError
from unmask.objectives import Decoding, build
from unmask.sampling import sample
from unmask.sampling.fit import METHODS, methods
from unmask.sampling.presets import PRESETS

FITS = [
    ("ar", {}, "causal"),
    ("mdlm", {"variant": "llada"}, "full prefix_cache dual_cache"),
    ("mdlm", {"variant": "dream"}, "full"),
    ("block_diffusion", {"block_size": "full"}, "full prefix_cache dual_cache"),
    ("block_diffusion", {"variant": "sdar", "block_size": 4}, "block"),
    ("fast_dllm_v2", {"block_size": 4}, "block"),
    ("block_diffusion", {"variant": "nemotron", "block_size": 4}, "block causal"),
    ("i_dlm", {"block_size": 4}, "block causal"),
    ("diffusion_gemma", {"block_size": 4}, "canvas"),
]


@pytest.mark.parametrize("name, options, fitting", FITS)
def test_a_method_or_a_preset_fits_how_a_model_was_trained_or_is_refused(name, options, fitting):
    decoding, fitting = build(name, options).decoding, fitting.split()
    assert set(methods(decoding)) == set(fitting)
    model, _ = tiny()
    asked = [(f"method={method}", method, {"method": method}) for method in METHODS]
    asked += [
        (f"preset={name} (method={one['method']})", one["method"], {"preset": name}) for name, one in PRESETS.items()
    ]
    for said, method, given in asked:
        if method in fitting:
            if method != "canvas":  # it is for DiffusionGemma's own layers
                found = sample(model, None, [1, 2, 3], decoding=decoding, length=6, **given)
                assert len(found.token) == 6 and MASK not in found.token
            continue
        with pytest.raises(UserError) as error:
            sample(model, None, [1, 2, 3], decoding=decoding, length=6, **given)
        assert str(error.value).startswith(f"sample: {said} does not fit this model, which was trained to be decoded ")
        assert f": use method={' or method='.join(m for m in methods(decoding))}" in str(error.value)


def test_what_is_given_beside_a_preset_decides():
    """LLaDA's sampler goes from left to right by block_size; its rule of commitment may be used in blocks."""
    model, _ = tiny()
    given = {"length": 8, "preset": "llada"}
    whole = sample(model, None, [1, 2], decoding=Decoding("full", None, False), block_size=4, **given)
    blocks = sample(model, None, [1, 2], decoding=Decoding("block", 4, False), method="block", **given)
    assert len(whole.token) == len(blocks.token) == 8


def test_the_sentence():
    model, _ = tiny()
    with pytest.raises(UserError) as error:
        sample(model, None, [1], decoding=Decoding("block", 4, False), preset="dream")
    assert str(error.value) == (
        "sample: preset=dream (method=full) does not fit this model, which was trained to be decoded in blocks of 4: "
        "use method=block or a preset among fast_dllm_v2, sdar, llada2"
    )
