"""The device that the engine computes on, and the type it computes in: asked for, against what is there.

Knows nothing of models. Everything asked of CUDA is asked here or in `capacity` (free memory), so that tests
can say what is there.
"""

import torch

from headway_engine.fused import isa
from headway_engine.model_source import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device behind `auto`, `cpu`, `cuda` or `cuda:N`. Raises ModelError that says what is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (reason := _why_not_cuda(device)):
        raise ModelError(f"device: {name!r} is not there: {reason}; use auto or cpu")
    return device


def choose_dtype(name: str, device: torch.device, stored: torch.dtype | None = None) -> torch.dtype:
    """The compute type behind `auto`, for weights that are `stored` so (None: nobody knows).

    On CUDA bfloat16, or float16 before compute capability 8.0, which only imitates bfloat16. On a CPU
    bfloat16 where its products are faster than those of float32 and the weights lose nothing by it; else
    float32. Raises ModelError.
    """
    if name != "auto":
        try:
            return _DTYPES[name]
        except KeyError:
            raise ModelError(f"dtype: {name!r}; use auto, float32, bfloat16 or float16") from None
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float16
    best = _instruction_set()
    faster = stored is torch.bfloat16 and best is not None and best.multiplies_bf16
    return torch.bfloat16 if faster else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As settings, logs and the API say it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def slow_here(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device only imitates this type. Raises ModelError for an environment that forbids what it
    cannot."""
    if device.type != "cpu" or dtype is torch.float32:
        return False
    best = _instruction_set()
    return dtype is not torch.bfloat16 or best is None or not best.has_bf16


def _instruction_set() -> isa.InstructionSet | None:
    """The best that the CPU may use. Raises ModelError."""
    sets = isa.available()
    return isa.INSTRUCTION_SETS[sets[0]] if sets else None


def _why_not_cuda(device: torch.device) -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device and driver are seen (in Kubernetes: does the pod ask for one?)"
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        return f"there are {count} CUDA devices, counted from cuda:0"
    return None
