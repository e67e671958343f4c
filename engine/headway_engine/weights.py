"""A Hugging Face folder becomes a model in memory, whole or not at all.

Looks at the files before transformers does, because transformers fills what is missing with random numbers
and a warning. Pickles are read as tensors only, code in a repository is never run. Knows nothing of devices
and of what the architecture needs.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from headway_engine.logs import fields
from headway_engine.model_error import ELSEWHERE, ModelError, in_words
from headway_engine.quantization import named_method, on_the_fly

log = logging.getLogger(__name__)

_Auto: Any = AutoModelForCausalLM  # the methods of neither carry types
_transformers_logging: Any = transformers_logging

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_QUANTIZED_NAMES = ("weight_scale", "scale_inv", "qweight", "qzeros", "absmax", "_packed", "scales", "SCB")
_FILE_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CONFIG_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 1 << 30


def read_folder(
    folder: Path, uri: str, dtype: torch.dtype, quantize: str, progress: Callable[[str], None]
) -> Any:
    """The model in `folder`, on the CPU, in `dtype`; with `quantize` not empty, packed while it is read.

    Raises ModelError that names the file when something is missing, cut short or not to be trusted.
    """
    config = _configuration(folder)
    files = weight_files(folder)
    for file in files:
        check_whole(file)
    size = sum(file.stat().st_size for file in files) / _GIB
    progress(f"loading weights from {folder}: {len(files)} {_plural(files)}, {size:.2f} GiB")
    arguments: dict[str, Any] = {}
    if quantize:
        arguments["quantization_config"] = on_the_fly(quantize, config)
    try:
        with _reports_to(progress, size):
            module, found = _Auto.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, output_loading_info=True, **arguments
            )
    except MemoryError as error:
        raise ModelError(f"model: not enough memory for the weights of {uri}") from error
    except ImportError as error:
        what = f"its weights are quantized with {method}, and " if (method := named_method(config)) else ""
        raise ModelError(
            f"model: {uri} needs a package that is not installed: {what}{in_words(error)}"
        ) from error
    except Exception as error:
        raise ModelError(
            f"model: {uri} cannot be loaded as a causal language model: {in_words(error)}"
        ) from error
    _judge(found, uri, getattr(module, "hf_quantizer", None) is not None)
    return module


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights of a folder are in, all there. Raises ModelError that names missing ones."""
    for name in _SINGLE:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return _shards(index)
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise ModelError(
        f"model: {folder} has no weights: neither model.safetensors, model.safetensors.index.json nor "
        f"pytorch_model.bin; there is {there}"
    )


def check_whole(file: Path) -> None:
    """Refuse a file that is cut short or only stands for weights. Raises ModelError with its name."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
    if start.startswith(b"version "):
        raise ModelError(f"model: {file} is a Git LFS pointer and not the weights; run `git lfs pull`")
    if file.suffix != ".safetensors":
        return
    tensors = _tensors(file)
    whole = 8 + int.from_bytes(start, "little") + max((t.end for t in tensors), default=0)
    if size != whole:
        raise ModelError(f"model: {file} has {size} bytes and should have {whole}; fetch it anew")


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The type that most of a folder's weights are in: by their files, or by config.json where these are
    pickles; None where nothing says it. What is wrong with the files is told by who reads them."""
    sizes: Counter[str] = Counter()
    try:
        for file in weight_files(folder):
            for tensor in _tensors(file) if file.suffix == ".safetensors" else ():
                sizes[tensor.type] += tensor.end - tensor.begin
        if sizes:
            return _FILE_TYPES.get(sizes.most_common(1)[0][0])
        config = _configuration(folder)
    except ModelError:
        return None
    return _CONFIG_TYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the header of a safetensors file says of one: its type, and its bytes behind the header."""

    type: str
    begin: int
    end: int


def _tensors(file: Path) -> list[_Tensor]:
    """Raises ModelError for a header that is not whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header: Any = json.loads(opened.read(length)) if length <= size - 8 else None
            return [_Tensor(t["dtype"], *t["data_offsets"]) for n, t in header.items() if n[0] != "_"]
        except (ValueError, AttributeError, TypeError, KeyError, LookupError):
            raise ModelError(
                f"model: {file} is no safetensors file, or cut short in its header: it has {size} bytes; "
                "fetch it anew"
            ) from None


@contextmanager
def _reports_to(progress: Callable[[str], None], size_gib: float) -> Iterator[None]:
    """Send transformers' progress to `progress`, each tenth of the weights. Its warnings are judged later."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = factory(*args, **kwargs)
        return tenths(made, len(args[0])) if kwargs.get("desc") == "Loading weights" and args else made

    def tenths(items: Iterable[Any], total: int) -> Iterator[Any]:
        told = 0
        for done, item in enumerate(items, 1):
            yield item
            if told < (tenth := 10 * done // total) < 10:
                told = tenth
                progress(f"loading weights: {tenth * 10} % of {size_gib:.2f} GiB")

    _transformers_logging.disable_progress_bar()
    hook = _transformers_logging.set_tqdm_hook(bar)
    before = _transformers_logging.get_verbosity()
    _transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        _transformers_logging.set_verbosity(before)
        _transformers_logging.set_tqdm_hook(hook)


def _configuration(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {file} cannot be read: {error}") from error
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model: {folder} has an adapter (adapter_config.json), which is not applied; merge it into its "
            "base model and save that"
        )
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = ", and code of its own (auto_map) is never run" if "auto_map" in config else ""
        raise ModelError(
            f"model: {folder} cannot be loaded as a causal language model: transformers knows no model_type "
            f"{kind!r}{code}; {ELSEWHERE}"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model: {folder} cannot be loaded as a causal language model: transformers has none of "
            f"model_type {kind!r} (encoder-decoders and models of images or sound are not served); "
            f"{ELSEWHERE}"
        )
    return dict(config)


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"model: {index} is not an index of weights: {error!r}") from error
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"model: {index} names {len(files)} files, and {len(missing)} of them are not there: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; fetch them"
        )
    return files


def _judge(found: Mapping[str, Any], uri: str, quantized: bool) -> None:
    """Refuse a model whose weights did not all come from its files."""
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"model: the files of {uri} lack {len(missing)} weights of the model, such as {missing[0]}; "
            "they would be random"
        )
    unexpected = sorted(found["unexpected_keys"])
    marks = [name for name in unexpected if any(mark in name for mark in _QUANTIZED_NAMES)]
    if marks and not quantized:
        raise ModelError(
            f"model: the weights of {uri} are quantized ({marks[0]}), and config.json says nothing of it "
            "(quantization_config)"
        )
    if unexpected:
        log.info(fields("weights-unused", weights=len(unexpected), such_as=unexpected[0], model=uri))


def _plural(files: list[Path]) -> str:
    return "file" if len(files) == 1 else "files"
