"""`unmask demo`: a diffusion language model learns Python from this Python's own source, and fills holes in functions.

No file and no network: the standard library is the corpus. As SDAR, Dream and Fast-dLLM v2 do, it starts from an
autoregressive model and converts it. Both are normal runs, made of the pieces that `unmask train` is made of:

    <out>/ar       from random weights, objective `ar`
    <out>/ar-hf    its export
    <out>          from that export, objective `fast_dllm_v2`; sample, eval, export and train go on with it

Run again, the demo takes up what it finds there.
"""

from unmask.demo.settings import Settings
from unmask.demo.story import run

__all__ = ["Settings", "run"]
