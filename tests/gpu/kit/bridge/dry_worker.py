"""A worker for the GPU that is not there."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.warmup.kernel_warmup import kernel_warmup
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

KV_CACHE_BYTES = 256 << 20


_make_handler = SingleDirectionOffloadingHandler.__init__


def _handler(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a handler of copies, which asserts that the cache is a GPU's."""
    torch.Tensor.is_cuda = True
    try:
        _make_handler(self, *args, **kwargs)
    finally:
        del torch.Tensor.is_cuda


SingleDirectionOffloadingHandler.__init__ = _handler


class DryWorker(Worker):
    """vLLM's GPU worker without memory to measure, graphs, or kernels that start."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def _make_model_runner(self) -> Any:
        return CPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        return KV_CACHE_BYTES

    def compile_or_warm_up_model(self) -> CompilationTimes:
        kernel_warmup(self)
        return CompilationTimes(language_model=0.0, encoder=0.0)
