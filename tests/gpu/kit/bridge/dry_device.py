"""A Hopper GPU that is not there: vLLM's CUDA path over the memory of the host.

Triton compiles every kernel for the GPU and starts none, so what an engine computes means nothing;
all else runs. With `TRITON_INTERPRET=1` the kernels are interpreted instead: right and very slow.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

NAME = "NVIDIA H100 that is not there"
CAPABILITY = (9, 0)
SHARED_BYTES, MULTIPROCESSORS = 232_448, 132
MEMORY_BYTES = 80 << 30
started: list[str] = []
"""Names of the kernels that would have been started, in order."""


class _Starter:
    """Takes the place of a kernel's launcher."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        started.append(self.name)


class _Properties:
    """The device's properties and its loader of compiled kernels."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": MULTIPROCESSORS,
            "max_num_regs": 65_536,
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5_120,
        }

    @staticmethod
    def load_binary(*args: Any) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spills and most threads of a block."""
        return 0, 0, 0, 0, 1024


class DryDriver(DriverBase):
    """Triton's driver of the GPU that is not there."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = _Properties(), _Starter

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is nothing to time")


def _first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel with the first of its configurations: there is nothing to time."""
    config = self.configs[0]
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


_patch_tensor = interpreter._patch_lang_tensor


def _patch_scalars(tensor: Any, scope: Any) -> None:
    """Have Triton's interpreter take arrays of one element as indices; NumPy 2.5 does not."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Stream:
    """A stream of which all work is done."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """No operation."""

    def wait_event(self, event: Any) -> None:
        """No operation."""


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """No operation."""

    def synchronize(self) -> None:
        """No operation."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _pretend() -> None:
    """Let Triton and PyTorch answer for the GPU."""
    torch.cuda.get_device_name = lambda device=None: NAME
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.accelerator.device_index = lambda index: contextlib.nullcontext()
    torch.cuda.Stream = _Stream
    torch.Event = torch.cuda.Event = _Event
    Autotuner.run = _first_config
    interpreter._patch_lang_tensor = _patch_scalars
    if os.environ.get("TRITON_INTERPRET") != "1":
        triton.runtime.driver.set_active(DryDriver())


_pretend()


class DryPlatform(CudaPlatformBase):
    """vLLM's CUDA platform, with tensors in the memory of the host."""

    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    Stream = _Stream
    current_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(lambda *_: contextlib.nullcontext())

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "kit_bridge.dry_worker.DryWorker"
        vllm_config.parallel_config.disable_custom_all_reduce = True

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*CAPABILITY)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return NAME

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return MEMORY_BYTES

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def set_device(cls, device: Any) -> None:
        """No operation."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """No operation."""

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return 0.0

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return (
            "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        )

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        return False

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return MULTIPROCESSORS

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def support_deep_gemm(cls) -> bool:
        return False
