"""One rank of benchmarks/block_parallel.py: builds strategies, runs them when told to, and reports times.

Speaks JSON lines on stdin and stdout. An "attention" strategy is attention layers alone, forward and backward; a "step"
is a whole training step. Wires other than the real one: `Blocking` waits for each round at once (no overlap), `Silent`
sends nothing (compute only).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unmask.attention.attend import attend
from unmask.blocks.axis import BlockAxis, Layers, place
from unmask.blocks.exchange import Axis, Traffic, Wire
from unmask.blocks.exchange.divided import DividedPattern
from unmask.blocks.exchange.wire import Round
from unmask.config import ParallelConfig
from unmask.objectives import build
from unmask.rows import IGNORE, Document, Rows, Shape

BLOCK = 32


class Blocking(Wire):
    """Every round is waited for before anything else happens."""

    def post(self, kind: str, sends: Any, receives: Any) -> Round:
        posted = super().post(kind, sends, receives)
        posted.wait()
        return posted


class Silent(Wire):
    """Nothing is sent; what should have arrived is filled with a constant."""

    def post(self, kind: str, sends: Any, receives: Any) -> Round:
        for _, tensor in receives:
            tensor.fill_(0.01)
        return Round(self, [], [])


def document(length: int, prompt: float, sample: int = 0) -> Document:
    token = np.random.default_rng(sample).integers(0, 500, length)
    return Document(token, np.arange(length) >= prompt * length, sample)


def rows_of(case: dict[str, Any]) -> Rows:
    objective = build("block_diffusion", {"block_size": BLOCK}).model_copy(update={"mask_token_id": 511})
    prompt, conventional = case.get("prompt", 0.0), case.get("conventional", False)
    documents = [document(length, 0.0 if conventional else prompt, i) for i, length in enumerate(case["lengths"])]
    rows = objective.rows(documents, 0, objective.levels(documents, 0))
    if not conventional:
        return rows.pruned()
    # What public trainers compute: noisy copies of all tokens, of which the prompt's carry no label.
    asked = rows.position >= prompt * case["lengths"][0]
    return replace(rows, label=np.where(asked, rows.label, IGNORE))


class Rank:
    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        threads = int(os.environ.get("THREADS", "1"))
        torch.set_num_threads(threads)
        if self.size > 1:
            dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=self.rank, world_size=self.size)
            self.groups = [dist.new_group() for _ in range(2)]
        self.runs: dict[str, Callable[[], Any]] = {}
        self.traffic: dict[str, Traffic] = {}
        self.kept: list[Any] = []

    def axis(self, kind: str, name: str) -> Axis:
        traffic = self.traffic[name] = Traffic()
        wire = {"overlap": Wire, "blocking": Blocking, "compute": Silent, "transfer": Wire}[kind]
        return Axis(wire(self.groups, traffic), traffic=traffic)

    def attention(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        """Attention layers of one pack under one placement, exchange and wire."""
        rows, heads, kv_heads, dim = rows_of(case), case["heads"], case["kv_heads"], case["head_dim"]
        # Attention alone: the linear layers weigh nothing.
        layers = Layers(Shape(0, 0, heads * dim, (None,)), _widths(heads, kv_heads, dim))
        placed = place(rows, layers, self.size, case["placement"], case["exchange"])
        index, _ = placed.local(self.rank)
        pattern = DividedPattern(
            placed.division(None), case["exchange"], self.axis(case["wire"], name), torch.device("cpu")
        )
        if case["wire"] == "transfer":
            _without_tiles(pattern.exchange)
        generator = torch.Generator().manual_seed(self.rank)
        q, k, v, grad = (
            torch.randn((1, len(index), n, dim), generator=generator).transpose(1, 2)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        for x in (q, k, v):
            x.requires_grad_()
        self.kept.append(pattern)

        def run() -> None:
            for _ in range(case.get("layers", 1)):
                out, _ = attend(q, k, v, pattern.handle, dim**-0.5)
                torch.autograd.grad(out, (q, k, v), grad)

        self.runs[name] = run
        return {"rows": len(index)}

    def step(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        """A whole training step of a small Qwen3; `wire` null is one process."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from unmask.attention import NAME, register
        from unmask.models import RowModel
        from unmask.models.fused.fuse import fuse
        from unmask.models.prove import proofs_of
        from unmask.parallel.replicas import summed

        register()
        torch.manual_seed(0)
        fields = dict(case["model"])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
        fuse(model, proofs_of(model))
        row_model = RowModel(model, skip_last_layer="auto")
        if case.get("checkpointing", "none") != "none":
            from unmask.engine.activations import apply

            apply(model, case["checkpointing"])
        module: torch.nn.Module = row_model
        if self.size > 1:
            layers = Layers(row_model.shape, row_model.decoder.widths(torch.float32))
            config = ParallelConfig(placement=case["placement"], exchange=case["exchange"])
            row_model.axis = BlockAxis(self.axis(case["wire"], name), layers, config)
            module = summed(row_model, torch.device("cpu"))
        objective = build("block_diffusion", {"block_size": BLOCK}).model_copy(update={"mask_token_id": 511})
        rows = rows_of(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(batch: Any, count: float) -> None:
            (module(batch, objective).sum / count).backward()
            optimizer.step()
            optimizer.zero_grad()

        few = rows_of({**case, "lengths": [128]})
        step(row_model.collate(few), few.count)  # what does not grow with the pack is there from here on
        before = _peak()
        batch = row_model.collate(rows)
        self.runs[name] = lambda: step(batch, rows.count)
        return {"before": before, "rows": batch.rows}

    def run(self, name: str) -> dict[str, Any]:
        if self.size > 1:
            dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        self.runs[name]()
        seconds, cpu = time.perf_counter() - start, time.process_time() - used
        sent, waited = self.traffic[name].read() if name in self.traffic else ({}, 0.0)
        return {"seconds": seconds, "cpu": cpu, "waited": waited, "sent": sum(sent.values()), "peak": _peak()}


def _widths(heads: int, kv_heads: int, dim: int) -> Any:
    from unmask.blocks.exchange import Widths

    return Widths(heads, kv_heads, dim)


def _without_tiles(exchange: Any) -> None:
    exchange.local, exchange.before, exchange.after = [], [], []
    for chunk in exchange.chunks:
        chunk.tiles.clear()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; this process ends with its input
    rank = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command["do"])(*command["with"])
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
