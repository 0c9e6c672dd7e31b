"""Peak memory of loading a checkpoint and of writing it back, over what must be held.

A model of eight layers, stored as LLaDA 8B is (and as transformers stores Llama), a layer a file. `loading` is the peak
of a process that loads it, less the memory of the same process before, over the model and its largest shard;
`writing` is that of exporting it again, with shards of the same size. Each runs in a process of its own. `divided` is
the peak of two ranks of FSDP2 that load it from files of two layers, over a rank's share and 1.3 of a file.

    python benchmarks/loading.py [--json] [--rounds 1]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Figure, run_cases

WIDTH, INNER, LAYERS, VOCABULARY = 1024, 2816, 8, 4096
LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": WIDTH, "n_layers": LAYERS, "n_heads": 16,
    "n_kv_heads": 16, "mlp_hidden_size": INNER, "embedding_size": VOCABULARY, "vocab_size": VOCABULARY,
    "max_sequence_length": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False,
    "mask_token_id": VOCABULARY - 1, "torch_dtype": "float32",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": INNER, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "mask_token_id": VOCABULARY - 1, "dtype": "float32",
    "unmask": {"name": "mdlm", "options": {}},
}  # fmt: skip
#: What a process knows of its own memory.
RESIDENT = """
import resource, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))

def resident():
    return int(next(line for line in open('/proc/self/status') if line.startswith('VmRSS')).split()[1]) * 1024

def peak():
    return int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]) * 1024

def reset():
    Path('/proc/self/clear_refs').write_text('5')
"""
#: Run in a process of its own: peak - before, in bytes. argv: the folder, and where to write to.
PROGRAM = """
from unmask.export import hf
from unmask.models import families
from unmask.runs.open import open_model

before = resident()
reset()
opened = open_model(sys.argv[1])
loading = peak() - before
model = sum(each.numel() * each.element_size() for each in opened.model.parameters())
reset()
out = Path(sys.argv[2])
out.mkdir()
if families.origin_of(opened.model):
    families.write_folder(opened.model, out, int(sys.argv[3]))
else:
    hf.write(opened, out)
print(loading, peak() - before, model)
"""


#: A rank: its peak less what it had before, and its share, in bytes. argv: the folder, where a run may be.
DIVIDED = """
import torch
import torch.distributed.checkpoint
from unmask.config import Config
from unmask.parallel import apply
from unmask.models.families.materialise import fill
from unmask.parallel.mesh import started
from unmask.training import setup

tree = {'model': {'name': sys.argv[1]}, 'data': {'pack_tokens': 64}, 'objective': {'name': 'mdlm'},
        'training': {'steps': 1, 'batch_size': 2}, 'checkpoint': {'path': sys.argv[2]},
        'parallel': {'shard_size': 2}}
config = Config.parse(tree)
tiny = {'model_type': 'llama', 'hidden_size': 8, 'intermediate_size': 8, 'num_hidden_layers': 1, 'vocab_size': 65,
        'num_attention_heads': 1}
small = Config.parse(tree | {'model': {'config': tiny, 'mask_token_id': 64}})
data = [{'input_ids': list(range(64))}] * 4
with started(config.parallel, torch.device('cpu')) as mesh:
    apply.parallelise(setup.prepare(small, data).row_model, mesh, config.parallel, torch.float32)  # imports
    before = resident()
    reset()
    run = setup.prepare(config, data)
    apply.parallelise(run.row_model, mesh, config.parallel, run.precision.dtype)
    fill(run.model)
    loading = peak() - before
    share = sum(each.to_local().nbytes for each in run.model.parameters())
print(loading, share)
"""


def stored(folder: Path, config: dict[str, Any], names: list[tuple[str, tuple[int, ...]]], layers: int = 1) -> int:
    """Write a checkpoint, a file for so many layers and one for the rest; returns the bytes of the largest."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in names:
        digits = "".join(part for part in name.split(".") if part.isdigit())
        groups.setdefault(str(int(digits) // layers) if digits else "rest", {})[name] = torch.randn(shape)
    table = {}
    for number, group in enumerate(groups.values(), 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def shapes(layer: str, names: dict[str, str], ends: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of a checkpoint's tensors. names: LLaDA's name of a layer's tensor -> this layout's."""
    sizes = {"ff_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "ff_out": (WIDTH, INNER)}
    sizes |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (WIDTH, WIDTH))
    sizes |= {"attn_norm": (WIDTH,), "ff_norm": (WIDTH,)}  # type: ignore[dict-item]
    found = [(f"{layer}.{i}.{names.get(n, n)}.weight", s) for i in range(LAYERS) for n, s in sizes.items()]
    return [*found, *ends.items()]


TABLE = (VOCABULARY, WIDTH)
LAYOUTS = {
    "LLaDA": (
        LLADA,
        shapes(
            "model.transformer.blocks", {},
            {"model.transformer.wte.weight": TABLE, "model.transformer.ln_f.weight": (WIDTH,),
             "model.transformer.ff_out.weight": TABLE},
        ),
    ),
    "Llama": (
        LLAMA,
        shapes(
            "model.layers",
            {**{f"{n}_proj": f"self_attn.{n}_proj" for n in "qkv"}, "attn_out": "self_attn.o_proj",
             "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"},
            {"model.embed_tokens.weight": TABLE, "model.norm.weight": (WIDTH,), "lm_head.weight": TABLE},
        ),
    ),
}  # fmt: skip


def memory(rounds: int) -> Iterator[Figure]:
    """Peaks over the model's own bytes and 1.3 of its largest shard."""
    for name, (config, names) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            shard = stored(Path(folder) / "in", config, names)
            worst = [0.0, 0.0]
            for number in range(rounds):
                argv = [sys.executable, "-c", RESIDENT + PROGRAM, f"{folder}/in", f"{folder}/out{number}", str(shard)]
                done = subprocess.run(argv, check=True, capture_output=True, text=True)
                loading, writing, model = map(int, done.stdout.split())
                allowed = model + 1.3 * shard
                worst = [max(worst[0], loading / allowed), max(worst[1], writing / allowed)]
        yield Figure(f"{name}: peak of loading over the model and 1.3 of a shard", worst[0], 1.0, "<=")
        yield Figure(f"{name}: peak of writing over the same", worst[1], 1.0, "<=")


def divided(rounds: int) -> Iterator[Figure]:
    for name, (config, names) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            shard, worst = stored(Path(folder) / "in", config, names, layers=2), 0.0
            for number in range(rounds):
                argv = [sys.executable, "-c", RESIDENT + DIVIDED, f"{folder}/in", f"{folder}/run{number}"]
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                ranks = [
                    subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | world | {"RANK": rank})
                    for rank in "01"
                ]
                for rank in ranks:
                    loading, share = map(int, rank.communicate()[0].split())
                    worst = max(worst, loading / (share + 1.3 * shard))
        yield Figure(f"{name}: peak of a rank of two over its share and 1.3 of a shard", worst, 1.0, "<=")


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, {"memory": memory, "divided": divided}, 1, "processes of each kind"))
