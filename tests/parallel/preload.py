"""What the server of the worker processes imports before it forks them: also modules that a run imports late."""

import os
from importlib import import_module

#: Libraries read these when they are loaded.
os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

for name in (
    "torch.distributed._composable.replicate",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "unmask.cli.main",
    "unmask.training.trainer",
    "tests.training.tiny",
    "tests.parallel.trainer_cases",
):
    import_module(name)
