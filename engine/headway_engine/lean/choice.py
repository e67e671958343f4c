"""Which kernel of attention an accelerator uses.

The first, in order of preference, that is installed, takes what the model needs, and then gives the
reference's answers on the very device.
The table is pure; `pick` imports and tries. One log line says which it is and what spoke against the others.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headway_engine.config import ATTENTIONS
from headway_engine.lean.installed import FlashAttention2, FlashAttention3, TorchVarlen
from headway_engine.lean.kernels import Decodes, GatherKernel, PagedKernel, Prefills
from headway_engine.listening import LayerShape
from headway_engine.logs import fields

log = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model and a cache ask of a kernel, and what there is to run it on."""

    dtype: torch.dtype
    shapes: frozenset[LayerShape]
    block_tokens: int
    compute_capability: tuple[int, int]  # of the CUDA device: (9, 0) is Hopper

    @property
    def widest(self) -> int:
        """Widest head."""
        return max(max(s.key_width, s.value_width) for s in self.shapes)

    @property
    def narrow_step(self) -> bool:
        """All heads are whole eighths wide, and values as wide as keys."""
        return all(s.key_width == s.value_width and s.key_width % 8 == 0 for s in self.shapes)


Importer = Callable[[str], Any]
"""Returns a module by its name, or raises ImportError. A kernel library that is broken may raise anything."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that may be used."""

    name: str  # as in config.ATTENTIONS
    why_not: Callable[[Needs], str | None]  # what it cannot do; None when it can
    load: Callable[[Importer], PagedKernel]  # raises ImportError, or says by RuntimeError what is missing


def _not_flash_3(needs: Needs) -> str | None:
    return (
        _not_half(needs)
        or _width_over(needs, 256)
        or _not_on(needs, needs.compute_capability[0] == 9, "only for compute capability 9.x")
    )


def _not_flash_2(needs: Needs) -> str | None:
    block = needs.block_tokens
    return (
        _not_half(needs)
        or _width_over(needs, 256)
        or _not_on(needs, needs.compute_capability >= (8, 0), "only from compute capability 8.0")
        or (f"blocks of {block} tokens are no multiple of 256" if block % 256 else None)
    )


def _not_varlen(needs: Needs) -> str | None:
    block = needs.block_tokens
    return (
        _not_half(needs)
        or _width_over(needs, 128)
        or _not_on(needs, needs.compute_capability[0] in (9, 10), "only for compute capability 9.x and 10.x")
        or (f"blocks of {block} tokens are no power of two" if block & (block - 1) else None)
    )


def _not_triton(needs: Needs) -> str | None:
    return _not_on(needs, needs.compute_capability >= (8, 0), "only from compute capability 8.0") or (
        f"heads of {needs.widest} are wider than 256" if needs.widest > 256 else None
    )


def _not_half(needs: Needs) -> str | None:
    return None if needs.dtype in _HALF else f"no kernel for {str(needs.dtype).removeprefix('torch.')}"


def _width_over(needs: Needs, most: int) -> str | None:
    if needs.narrow_step and needs.widest <= most:
        return None
    return f"heads must be alike, whole eighths wide, and {most} at most"


def _not_on(needs: Needs, fine: bool, words: str) -> str | None:
    major, minor = needs.compute_capability
    return None if fine else f"{words}, and this is {major}.{minor}"


def _load_flash_3(importer: Importer) -> PagedKernel:
    return FlashAttention3(importer("flash_attn_interface").flash_attn_with_kvcache)


def _load_flash_2(importer: Importer) -> PagedKernel:
    module = importer("flash_attn")
    return FlashAttention2(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)


def _load_varlen(importer: Importer) -> PagedKernel:
    function = importer("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(function).parameters:
        raise RuntimeError("this torch's has no block tables")
    return TorchVarlen(function)


def _load_triton(importer: Importer) -> PagedKernel:
    importer("triton")
    kernel: PagedKernel = importer("headway_engine.lean.triton_kernel").TritonKernel()
    return kernel


CANDIDATES = (
    Candidate("flash-attn-3", _not_flash_3, _load_flash_3),
    Candidate("flash-attn-2", _not_flash_2, _load_flash_2),
    Candidate("torch-varlen", _not_varlen, _load_varlen),
    Candidate("triton", _not_triton, _load_triton),
)
"""In order of preference: what others keep and tune for the chip first, then what is always there."""


def pick(
    needs: Needs,
    device: torch.device,
    *,
    asked: str = "auto",
    importer: Importer = importlib.import_module,
    candidates: tuple[Candidate, ...] = CANDIDATES,
) -> PagedKernel | None:
    """The best of `kernels`."""
    return next(kernels(needs, device, asked=asked, importer=importer, candidates=candidates))


def kernels(
    needs: Needs,
    device: torch.device,
    *,
    asked: str = "auto",
    importer: Importer = importlib.import_module,
    candidates: tuple[Candidate, ...] = CANDIDATES,
) -> Iterator[PagedKernel | None]:
    """Those that can be used, best first, each tried when it is asked for; None, for torch's own attention,
    is the last. Raises ValueError when the asked-for one cannot."""
    against: list[str] = []
    found = False
    for candidate in candidates:
        if asked not in ("auto", candidate.name):
            continue
        reason = candidate.why_not(needs)
        if reason is None:
            kernel, reason = _tried(candidate, needs, device, importer)
            if kernel is not None:
                log.info(fields("attention", kernel=candidate.name, passed_over="; ".join(against) or None))
                found = True
                yield kernel
                continue
        against.append(f"{candidate.name}: {reason}")
    if asked in ("auto", "torch"):
        log.info(fields("attention", kernel="torch", passed_over="; ".join(against) or None))
        yield None
    elif not found:
        raise ValueError(against[0] if against else f"{asked}: unknown; one of {', '.join(ATTENTIONS)}")


def takes(kernel: PagedKernel, needs: Needs) -> bool:
    """Whether a kernel is made for these needs, by its entry in the table; one that has none is."""
    name = kernel.name.replace(" ", "-")
    return all(candidate.why_not(needs) is None for candidate in CANDIDATES if candidate.name == name)


def _tried(
    candidate: Candidate, needs: Needs, device: torch.device, importer: Importer
) -> tuple[PagedKernel | None, str]:
    try:
        kernel = candidate.load(importer)
    except ImportError:
        return None, "not installed"
    except Exception as error:  # noqa: BLE001 - a library built for another torch may raise anything at import
        return None, _words(error)
    try:
        reason = disagreement(kernel, needs, device)
    except Exception as error:  # noqa: BLE001 - what a kernel says of a device it does not know varies
        return None, f"failed on this device: {_words(error)}"
    return (None, reason) if reason else (kernel, "")


def _words(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:200]}"


def disagreement(kernel: PagedKernel, needs: Needs, device: torch.device) -> str | None:
    """Why the kernel's answers on random numbers are not the reference's; None when they are.

    Contexts end inside a block, at its end, and after several; prefills begin at 0 and later.
    """
    reference = GatherKernel()
    size = needs.block_tokens
    contexts = (1, size, size + 1, 3 * size + size // 2)
    few = min(size, 16)
    lengths = (1, few, 2, few + 1)
    most = max(-(-c // size) for c in contexts)
    tables = torch.arange(len(contexts) * most, device=device, dtype=torch.int32).flip(0).view(-1, most)
    sizes = torch.tensor(contexts, dtype=torch.int32, device=device)
    starts = torch.tensor((0, *lengths), device=device).cumsum(0).to(torch.int32)
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(needs.dtype)

    worst = 0.0
    with torch.inference_mode():
        for shape in sorted(needs.shapes, key=lambda s: (s.heads, s.key_width, s.value_width)):
            keys = noise(tables.numel(), shape.heads, size, shape.key_width)
            values = noise(tables.numel(), shape.heads, size, shape.value_width)
            scale = shape.key_width**-0.5
            decodes = Decodes(tables, sizes, most * size)
            prefills = Prefills(starts, sizes, tables, lengths, contexts)
            for queries in (shape.heads, 4 * shape.heads):  # each with its own keys, and in groups
                one = noise(len(contexts), queries, shape.key_width)
                many = noise(sum(lengths), queries, shape.key_width)
                for found, expected in (
                    (kernel.decode(one, keys, values, decodes, scale),
                     reference.decode(one.float(), keys.float(), values.float(), decodes, scale)),
                    (kernel.prefill(many, keys, values, prefills, scale),
                     reference.prefill(many.float(), keys.float(), values.float(), prefills, scale)),
                ):  # fmt: skip
                    worst = max(worst, float((found.float() - expected).abs().max().nan_to_num(float("inf"))))
    tolerance = 1e-4 if needs.dtype is torch.float32 else 0.05
    return None if worst <= tolerance else f"its answers differ from torch's by {worst:.2g}"


def needs_of(
    shapes: frozenset[LayerShape], dtype: torch.dtype, block_tokens: int, device: torch.device
) -> Needs:
    """What the model needs on this CUDA device."""
    return Needs(dtype, shapes, block_tokens, torch.cuda.get_device_capability(device))
