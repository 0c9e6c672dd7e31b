"""Which samplers fit a model: those that ask it for what it was trained to predict.

| decoding                 | methods                        |                                                          |
|--------------------------|--------------------------------|----------------------------------------------------------|
| causal                   | causal                         |                                                          |
| full                     | full, prefix_cache, dual_cache | with a shift `full` alone                                |
| block                    | block                          |                                                          |
| block, clean rows causal | block, causal                  | the clean rows are an autoregressive model too (hybrids) |
| canvas                   | canvas                         |                                                          |

A sampler or a decoding that another package registered is its own business.
"""

from __future__ import annotations

from unmask.errors import UserError
from unmask.objectives import Decoding
from unmask.sampling.options import WHOLE, Options
from unmask.sampling.presets import PRESETS

#: The built-in samplers.
METHODS = ("block", "causal", "canvas", *WHOLE)


def methods(decoding: Decoding) -> tuple[str, ...]:
    """The built-in samplers that fit; none for a decoding that is not built in."""
    if decoding.kind == "full":
        return ("full",) if decoding.shift else WHOLE
    if decoding.kind == "block":
        return ("block", "causal") if decoding.causal else ("block",)
    return (decoding.kind,) if decoding.kind in METHODS else ()


def refuse_unfit(decoding: Decoding, options: Options) -> None:
    """UserError for a method, or a preset that has it, which does not fit a model of this decoding."""
    method, fitting = options.method, methods(decoding)
    if method not in METHODS or not fitting or method in fitting:
        return
    given = f"method={method}"
    if "method" not in options.model_fields_set:
        given = f"preset={options.preset} (method={method})"
    presets = [name for name, published in PRESETS.items() if published["method"] in fitting]
    others = f" or a preset among {', '.join(presets)}" if presets else ""
    raise UserError(
        f"sample: {given} does not fit this model, which was trained to be decoded {_words(decoding)}: use "
        f"method={' or method='.join(fitting)}{others}"
    )


def _words(decoding: Decoding) -> str:
    """How a model was trained to be decoded."""
    if decoding.kind == "block":
        return f"in blocks of {decoding.block_size}{', or a token at a time' if decoding.causal else ''}"
    shift = " with a shift" if decoding.shift else ""
    known = {"causal": "a token at a time", "full": f"as a whole sequence{shift}", "canvas": "canvas by canvas"}
    return known[decoding.kind]
