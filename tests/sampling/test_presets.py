"""Published decoding loops, written down again in plain torch with dense attention: the same tokens, one by one.

The loops follow the authors' code; only the draws are unmask's (two uniform numbers an open position), so that
both sides see the same random numbers, and the mask token is never drawn.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.sampling.reference import MASK, block_mask, logits, tiny
from unmask.errors import UserError
from unmask.models.families import families
from unmask.objectives import Decoding, build
from unmask.sampling import Options, sample
from unmask.sampling.presets import PRESETS

SEED = 4
PROMPT = [3, 14, 15, 9, 26, 5, 35]
FULL, SHIFTED = Decoding("full", None, False), Decoding("full", None, True)


def whole(twin, x: torch.Tensor) -> torch.Tensor:
    n = len(x)
    out = logits(twin, x.tolist(), list(range(n)), {"full_attention": torch.ones(n, n, dtype=torch.bool)})
    out[:, MASK] = -torch.inf
    return out


def drawn(rows: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor, top_k: int | None = None):
    """Tokens and the distribution they are drawn from, filtered as transformers' top-p and then top-k warpers do."""
    if temperature > 0:
        rows = rows / temperature
    ordered, index = rows.sort(descending=True, stable=True)
    remove = ordered.softmax(-1).cumsum(-1) > top_p
    remove[:, 1:] = remove[:, :-1].clone()
    remove[:, 0] = False
    if top_p < 1:
        rows = rows.masked_fill(torch.zeros_like(remove).scatter(-1, index, remove), -torch.inf)
    if top_k is not None:
        rows = rows.masked_fill(rows < rows.topk(top_k).values[:, -1:], -torch.inf)
    p = rows.softmax(-1)
    if temperature == 0:
        return rows.argmax(-1), p
    token = []
    for row, u in zip(p, uniform, strict=True):
        value, place = row.sort(descending=True, stable=True)
        token.append(place[int((value.cumsum(0) <= u).sum())])
    return torch.stack(token), p


def transfers(masks: int, steps: int) -> list[int]:
    """get_num_transfer_tokens of LLaDA, SDAR and LLaDA2."""
    return [masks // steps + (i < masks % steps) for i in range(steps)]


def llada(twin, length, block_length, steps, remasking, temperature, cfg):
    """ML-GSAI/LLaDA generate.py; steps of a block."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.tensor(PROMPT + [MASK] * length)
    prompt = x != MASK
    for start in range(len(PROMPT), len(x), block_length):
        counts = transfers(int((x[start : start + block_length] == MASK).sum()), steps)
        for n in counts:
            if n == 0:
                continue
            out = whole(twin, x)
            if cfg > 0:
                un = x.clone()
                un[prompt] = MASK
                other = whole(twin, un)
                out = (other + (cfg + 1) * (out - other)).nan_to_num(nan=-torch.inf)
            where = [p for p in range(start, min(start + block_length, len(x))) if x[p] == MASK]
            uniform = torch.rand(2, len(where), generator=generator)
            token, _ = drawn(out[where], temperature, 1.0, uniform[0])
            sure = out[where].softmax(-1).gather(-1, token[:, None])[:, 0]
            score = sure if remasking == "low_confidence" else uniform[1]
            for i in score.topk(n).indices:
                x[where[i]] = token[i]
    return x[len(PROMPT) :].tolist()


@pytest.mark.parametrize("cfg", [0.0, 1.5])
@pytest.mark.parametrize("remasking, temperature", [("low_confidence", 0.0), ("low_confidence", 0.7), ("random", 0.7)])
def test_llada(remasking, temperature, cfg):
    model, twin = tiny()
    given = {"strategy": "random"} if remasking == "random" else {}
    given |= {"guidance": cfg} if cfg else {}
    found = sample(
        model, None, PROMPT, decoding=FULL, preset="llada", length=14, block_size=7, steps=3, seed=SEED,
        temperature=temperature, **given,
    )  # fmt: skip
    assert found.token == llada(twin, 14, 7, 3, remasking, temperature, cfg)


def dream(twin, alg, temperature, top_p, top_k=None, alg_temp=0.0):
    """HKUNLP/Dream generation_utils.py, `_sample`: 13 tokens in 6 steps.

    torch.multinomial takes the largest of p / E, E exponential; here E is made of unmask's second number.
    """
    steps, generator = 6, torch.Generator().manual_seed(SEED)
    x = torch.tensor(PROMPT + [MASK] * 13)
    times = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64)
    for i in range(steps):
        where = (x == MASK).nonzero().flatten()
        if not len(where):
            break
        rows = torch.cat([(out := whole(twin, x))[:1], out[:-1]])[where]
        uniform = torch.rand(2, len(where), generator=generator)
        token, p = drawn(rows, temperature, top_p, uniform[0], top_k)
        stay = times[i + 1] / times[i]
        if alg == "origin":
            take = (uniform[1] > stay) if i < steps - 1 else torch.ones(len(where), dtype=torch.bool)
            x[where[take]] = token[take]
            continue
        score = p.gather(-1, token[:, None])[:, 0]
        if alg == "topk_margin":
            ordered = p.sort(descending=True).values
            score = ordered[:, 0] - ordered[:, 1]
        elif alg == "entropy":
            score = torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0).sum(-1)
        n = int(len(where) * (1 - stay)) if i < steps - 1 else len(where)
        if alg_temp > 0:
            score = (score / alg_temp).softmax(0) / -uniform[1].log()
        # Many scores are equal where top-p leaves one token: topk takes any of them, unmask the first.
        best = score.argsort(descending=True, stable=True)[:n]
        x[where[best]] = token[best]
    return x[len(PROMPT) :].tolist()


DREAM = [
    ("entropy", {}),
    ("topk_margin", {"strategy": "margin"}),
    ("maskgit_plus", {"strategy": "low_confidence"}),
    ("origin", {"strategy": "random", "schedule": "independent"}),
]


@pytest.mark.parametrize("alg, given", DREAM)
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.3])
def test_dream(alg, given, temperature):
    model, twin = tiny()
    found = sample(
        model, None, PROMPT, decoding=SHIFTED, preset="dream", length=13, steps=6, seed=SEED, temperature=temperature,
        **given,
    )  # fmt: skip
    assert found.token == dream(twin, alg, temperature, 0.95)


@pytest.mark.parametrize("alg, given", DREAM[:3])
@pytest.mark.parametrize(
    "temperature, top_k, alg_temp", [(0.4, None, 0.1), (1.3, 3, 0.1), (0.0, 5, 0.5), (2.0, 4, 0.0)]
)
def test_dream_by_chance(alg, given, temperature, top_k, alg_temp):
    """The preset as it is, but for top_k; and with other temperatures."""
    model, twin = tiny()
    given = (
        given if (temperature, alg_temp) == (0.4, 0.1) else given | {"temperature": temperature, "alg_temp": alg_temp}
    )
    found = sample(
        model, None, PROMPT, decoding=SHIFTED, preset="dream_chat", length=13, steps=6, seed=SEED, top_k=top_k, **given
    )
    expected = dream(twin, alg, temperature, 0.95, top_k, alg_temp)
    assert found.token == expected
    if alg_temp:
        assert expected != dream(twin, alg, temperature, 0.95, top_k)


@torch.no_grad()
def fast_dllm(twin, length, block_length, threshold, dual):
    """NVlabs/Fast-dLLM v1/llada/generate.py: generate_with_prefix_cache and generate_with_dual_cache."""
    x = torch.tensor(PROMPT + [MASK] * length)
    n, passes = len(x), 0

    def forward(start, stop, cache):
        """Rows [start, stop) against the cache, whose entries there are replaced."""
        old = [(layer.keys, layer.values) for layer in cache.layers] if cache else []
        fresh = DynamicCache()
        for number, (key, value) in enumerate(old):
            # The rows' own entries come last; attention does not care where.
            kept = torch.cat([torch.arange(start), torch.arange(stop, n)])
            fresh.update(key[:, :, kept], value[:, :, kept], number)
        size = (n - (stop - start) if cache else 0) + stop - start
        out = twin(
            input_ids=x[None, start:stop],
            position_ids=torch.arange(start, stop)[None],
            attention_mask={"full_attention": torch.zeros(1, 1, stop - start, size).double()},
            past_key_values=fresh,
            use_cache=True,
        ).logits[0]
        back = torch.cat([torch.arange(start), torch.arange(stop, n), torch.arange(start, stop)]).argsort()
        if cache:
            for layer in fresh.layers:
                layer.keys, layer.values = layer.keys[:, :, back], layer.values[:, :, back]
        out[:, MASK] = -torch.inf
        return out, fresh

    for first in range(len(PROMPT), n, block_length):
        last, cache = min(first + block_length, n), None
        while (x[first:last] == MASK).any():
            begin = 0 if cache is None else first
            end = n if cache is None or not dual else last
            out, now = forward(begin, end, cache)
            cache = now if cache is None or dual else cache
            passes += 1
            where = [p for p in range(first, last) if x[p] == MASK]
            sure, token = out[[p - begin for p in where]].softmax(-1).max(-1)
            for k, i in enumerate(sure.argsort(descending=True, stable=True)):
                if k == 0 or sure[i] > threshold:
                    x[where[i]] = token[i]
    return x[len(PROMPT) :].tolist(), passes


@pytest.mark.parametrize("method", ["prefix_cache", "dual_cache"])
def test_fast_dllm(method):
    model, twin = tiny(3)
    given = {"preset": "fast_dllm", "length": 18, "block_size": 6, "threshold": 0.25}
    found = sample(model, None, PROMPT, decoding=FULL, method=method, **given)
    assert (found.token, found.passes) == fast_dllm(twin, 18, 6, 0.25, method == "dual_cache")
    exact = sample(model, None, PROMPT, decoding=FULL, length=18, method="full", block_size=6, threshold=0.25)
    assert exact.token != found.token  # the cache is approximate, and this prompt shows it


def blockwise(twin, length, block, steps, settings, *, sub=None, shift=False):
    """SDAR generate.py (low_confidence_static and _dynamic), LLaDA2's generate, Fast-dLLM v2's with sub-blocks."""
    temperature, top_p, threshold = settings
    generator = torch.Generator().manual_seed(SEED)
    x = torch.tensor(PROMPT + [MASK] * length)

    def rows(start, stop):
        places = [*range(start), *range(start, stop)]
        out = logits(twin, x[places].tolist(), places, {"full_attention": block_mask(start, start, stop, block)})
        out[:, MASK] = -torch.inf
        return out[start:]

    for start in range(len(PROMPT) // block * block, len(x), block):
        stop = start + block
        if shift and x[start] == MASK:
            # The last clean row before the block.
            out = rows(start - block, start)[-1:]
            x[start] = drawn(out, temperature, top_p, torch.rand(2, 1, generator=generator)[0])[0][0]
        for first in range(start, stop, sub or block):
            last, step, counts = min(first + (sub or block), stop), 0, transfers(block, steps)
            while where := [p for p in range(first, last) if x[p] == MASK]:
                out = rows(start, stop)[[p - start - shift for p in where]]
                token, p = drawn(out, temperature, top_p, torch.rand(2, len(where), generator=generator)[0])
                sure = p.gather(-1, token[:, None])[:, 0]
                n = min(1 if sub else counts[step] if step < steps else len(where), len(where))
                if threshold is not None and (high := sure > threshold).sum() >= n:
                    take = high.nonzero().flatten()
                else:
                    take = sure.topk(n).indices
                x[torch.tensor(where)[take]] = token[take]
                step += 1
    return x[len(PROMPT) :].tolist()


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 1.0), (0.6, 0.9)])
@pytest.mark.parametrize(
    "preset, given, threshold",
    [
        ("sdar", {"threshold": 0.2}, 0.2),
        ("sdar", {"strategy": "low_confidence"}, None),
        ("llada2", {"threshold": 0.3}, 0.3),
    ],
)
def test_sdar_and_llada2(preset, given, threshold, temperature, top_p):
    model, twin = tiny()
    drawing = {"temperature": temperature, **({"top_p": top_p} if temperature else {})}
    found = sample(
        model, None, PROMPT, decoding=Decoding("block", 8, False), preset=preset, length=17, steps=3, seed=SEED,
        **drawing, **given,
    )  # fmt: skip
    assert found.token == blockwise(twin, 17, 8, 3, (temperature, top_p, threshold))


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.8, 0.9)])
def test_fast_dllm_v2(temperature, top_p):
    model, twin = tiny()
    drawing = {"temperature": temperature, **({"top_p": top_p} if temperature else {})}
    found = sample(
        model, None, PROMPT, decoding=Decoding("block", 8, True), preset="fast_dllm_v2", length=17, seed=SEED,
        threshold=0.3, sub_block_size=4, **drawing,
    )  # fmt: skip
    assert found.token == blockwise(twin, 17, 8, 8, (temperature, top_p, 0.3), sub=4, shift=True)


def test_presets_are_options_and_do_not_count_as_given():
    for name, options in PRESETS.items():
        read = Options.read([f"preset={name}"])
        assert {option: getattr(read, option) for option in options} == options
        assert read.model_fields_set == {"preset"}
    assert Options.read(["preset=sdar", "threshold=0.5"]).threshold == 0.5
    with pytest.raises(UserError, match="sample: none and sdar are two presets .--as NAME is preset=NAME.; give one"):
        Options.read(["preset=none", "length=3", "preset=sdar"])


def test_every_family_has_a_preset_that_decodes_as_it_was_trained():
    for family in (families[name] for name in families.names() if families[name].foreign):
        options = dict(family.objective)
        assert PRESETS[family.preset]["method"] == build(options.pop("name"), options).decoding.kind, family.name


@pytest.mark.parametrize(
    "given, decoding, message",
    [
        ({"preset": "sdarr"}, FULL, "did you mean 'sdar'"),
        (
            {"preset": "fast_dllm"},
            SHIFTED,
            "decoded as a whole sequence with a shift: use method=full or a preset among llada, dream, dream_chat$",
        ),
        ({"preset": "fast_dllm", "cache": False}, FULL, "cache=False has no effect"),
        ({"preset": "sdar", "guidance": 1.0}, Decoding("block", 8, False), "guidance=1.0 has no effect"),
        ({"tempered": True}, FULL, "tempered=True has no effect"),
        ({"top_k": 4}, FULL, "top_k=4 has no effect here: it needs a temperature above 0"),
        (
            {"alg_temp": 0.1},
            FULL,
            "alg_temp=0.1 has no effect here: it needs strategy=low_confidence, low_entropy or mar",
        ),
        ({"preset": "dream", "strategy": "random", "alg_temp": 0.1}, SHIFTED, "alg_temp=0.1 has no effect"),
        ({"sub_block_size": 4}, FULL, "sub_block_size=4 has no effect"),
        ({"sub_block_size": 8}, Decoding("block", 8, False), "sub_block_size=8 has no effect here: it needs blocks"),
        (
            {"sub_block_size": 4, "block_size": 3},
            Decoding("block", 8, False),
            "more than 4 tokens, and these have 3",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(given, decoding, message):
    model, _ = tiny()
    with pytest.raises(UserError, match=message):
        sample(model, None, PROMPT, decoding=decoding, length=4, **given)


@pytest.mark.parametrize("method", ["prefix_cache", "dual_cache"])
def test_caches_of_other_blocks_are_for_models_without_windows(method):
    model, _ = tiny(windows=5)
    with pytest.raises(UserError, match="has sliding windows: use method=full"):
        sample(model, None, PROMPT, decoding=FULL, length=4, method=method)
