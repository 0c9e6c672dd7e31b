"""The README.md of an exported folder: a header that hubs read, what the model is, and how to sample from it.

The sampler of the card needs transformers alone and writes what unmask's own does at temperature 0 with its defaults:
block by block (a whole text is one block), every masked token whose probability exceeds 0.9, at least the surest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unmask.hf import vocabulary_of
from unmask.models.decoder import spec_of
from unmask.models.special import end_tokens
from unmask.objectives import described, name_of

if TYPE_CHECKING:
    from unmask.runs.open import OpenModel

#: Where huggingface_hub keeps what it has fetched: the one place whose path tells the name of a model.
FETCHED = re.compile(r"(?:^|[\\/])models--([^\\/]+?)--([^\\/]+)(?:[\\/]|$)")

LOADING = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{folder}"
model = AutoModelForCausalLM.from_pretrained(folder).eval()
"""
TEXTS = """\
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt, length = tokenizer.encode("The"), 32
"""
IDS = """\
prompt, length = [1, 2, 3], 32  # token ids: the model has no tokeniser
"""

FILLING = """
mask, ends, shift = {mask}, {ends}, {shift}
token = torch.tensor(prompt + [mask] * length)
size = {size}  # of a block
with torch.no_grad():
    for start in range(len(prompt) // size * size, len(token), size):
        stop = min(start + size, len(token))
        at = torch.arange(stop)
        seen = torch.where(at < start, {context}, stop)  # a token sees those before this one
        bias = torch.zeros(stop, stop, dtype=model.dtype).masked_fill(at >= seen[:, None], torch.finfo(model.dtype).min)
        while len(open := (token[:stop] == mask).nonzero().flatten()):
            logits = model(token[None, :stop], attention_mask=bias[None, None], use_cache=False).logits[0].float()
            logits[:, {never}] = -torch.inf
            sure, best = logits[open - shift].softmax(-1).max(-1)
            commit = (sure > 0.9) | (sure == sure.max())
            if shift and open[0] == start:  # the row before the block knows its first token
                commit = open == start
            token[open[commit]] = best[commit]
        if ends & set(token[len(prompt) : stop].tolist()):
            break
answer = token[len(prompt) : stop].tolist()
answer = answer[: min([answer.index(end) for end in ends & set(answer)], default=len(answer))]
"""
WRITING = """
written = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
answer = written[0, len(prompt) :].tolist()
answer = answer[: min([answer.index(end) for end in {ends} & set(answer)], default=len(answer))]
"""
CANVASES = """\
It opens with transformers, which has a `generate` for it:

    model = AutoModelForMultimodalLM.from_pretrained("{folder}")
"""

SEES = {
    "full": "the whole text",
    "block": "its own block of {size} tokens and all blocks before it",
    "causal": "itself and the tokens before it",
}


def header(kind: str, objective: str, library: str, source: str | None) -> str:
    """The YAML that hubs read. kind: of decoding; source: path of what the training began from."""
    tags = ["unmask", "autoregressive" if kind == "causal" else "diffusion-language-model", objective]
    facts: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    if found := FETCHED.search(str(Path(source).absolute())) if source else None:
        facts["base_model"] = "/".join(found.groups())
    text = yaml.safe_dump(facts, sort_keys=False)
    return f"---\n{text}# license: yours to choose; a fine-tuned model has that of its base to mind\n---\n"


def title(kind: str) -> str:
    return f"{'An autoregressive' if kind == 'causal' else 'A diffusion'} language model"


def card(opened: OpenModel, folder: str) -> str:
    """Of a folder that transformers opens by itself."""
    objective, decoding = opened.objective, opened.objective.decoding
    start = header(decoding.kind, name_of(objective), "transformers", opened.source)
    parts = [f"{start}# {title(decoding.kind)} trained with unmask", f"Objective `{described(objective)}`."]
    if decoding.kind == "canvas":
        parts.append(CANVASES.format(folder=folder))
    elif decoding.kind == "causal":
        parts.append(f"```python\n{_sampler(opened, folder)}```")
    else:
        sees = SEES[decoding.kind].format(size=decoding.block_size)
        parts.append(
            f"It opens as a causal model of transformers and is none: every token sees {sees}, which takes a 4-D "
            f"attention mask. `generate()`, and servers of autoregressive models, would take no notice and write "
            f"nonsense."
        )
        windows = any(spec_of(opened.model).windows)
        parts.append(
            "Its layers have sliding windows, which such a mask leaves out: sample from it with unmask."
            if windows
            else f"```python\n{_sampler(opened, folder)}```"
        )
    return "\n\n".join([*parts, f'With unmask, and a cache: `unmask sample {folder} --prompt "..."`.']) + "\n"


def _sampler(opened: OpenModel, folder: str) -> str:
    """A program that leaves the new token ids in `answer` and prints them."""
    decoding, tokenizer = opened.objective.decoding, opened.tokenizer
    loading = LOADING.format(folder=folder) + (IDS if tokenizer is None else TEXTS)
    if tokenizer is None:
        loading = loading.replace(", AutoTokenizer", "")
    ends = sorted(end_tokens(opened.model, tokenizer, opened.model.get_output_embeddings().weight.shape[0]))
    shown = f"{{{', '.join(map(str, ends))}}}" if ends else "set()"
    if decoding.kind == "causal":
        body = WRITING.format(ends=shown)
    else:
        mask, rows = opened.mask_token_id, opened.model.get_output_embeddings().weight.shape[0]
        known = rows if tokenizer is None else vocabulary_of(tokenizer)
        body = FILLING.format(
            mask=mask,
            ends=shown,
            shift=int(decoding.shift),
            size=decoding.block_size or "len(token)",
            context="at + 1" if decoding.causal else "(at // size + 1) * size",
            never=f"[{mask}, *range({known}, {rows})]" if known < rows else mask,
        )
    return f"{loading}{body}print({'answer' if tokenizer is None else 'tokenizer.decode(answer)'})\n"
