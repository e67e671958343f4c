"""A GGUF file as a Hugging Face folder: tokenizer first (quick), weights later (unpacked to float16).

transformers reads the format; its `from_pretrained` would keep the weights packed, so the state dict is
loaded here. float16 holds what a 4-bit file knows, in half the space of float32.
The file is parsed once for all of it. Knows nothing of caches and locks.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway_engine.file_digest import Identity
from headway_engine.gguf_rope import add_rope_scaling
from headway_engine.model_error import ModelError, in_words

_BYTES_OF_FLOAT16 = 2


def write_tokenizer(gguf: Path, out: Path) -> None:
    """Save the file's tokenizer and chat template under `out`."""
    from transformers import AutoTokenizer

    try:
        with _parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:
        raise ModelError(
            f"model: the tokenizer in {gguf} cannot be read: {in_words(error)}; the file may be cut "
            "short: fetch it anew"
        ) from error
    tokenizer.save_pretrained(str(out))


def unpacked_bytes(gguf: Path) -> int:
    """What the weights take when they are unpacked. Raises ModelError."""
    with _reading(gguf):
        tensors = _reader(gguf).tensors
    return sum(int(tensor.n_elements) for tensor in tensors) * _BYTES_OF_FLOAT16


def described(gguf: Path) -> tuple[Any, Any, str]:
    """The transformers configuration of the model in a file, gguf's reader of the file, and gguf's name of
    the architecture. Raises ModelError."""
    import transformers

    auto: Any = transformers
    with _reading(gguf):
        config = auto.AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        reader = _reader(gguf)
        architecture = str(reader.fields["general.architecture"].contents())
        add_rope_scaling(config, reader, architecture)
    return config, reader, architecture


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """The module of this configuration on the meta device."""
    import transformers

    auto: Any = transformers
    with torch.device("meta"):
        return auto.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def lacks(gguf: Path, config: Any, missing: Iterable[str]) -> ModelError:
    """The error of a file that has not all weights of its model."""
    return ModelError(f"model: {gguf} lacks weights of {config.model_type}: {sorted(missing)[:5]}")


def write_weights(gguf: Path, out: Path) -> None:
    """Save configuration, generation configuration and unpacked weights under `out`. Raises ModelError."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils  # it carries no types
    config, _, _ = described(gguf)
    with _reading(gguf):
        module = without_weights(config, torch.float16)
        parsed = reader.load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=module, torch_dtype=torch.float16
        )
    tensors = {name: torch.as_tensor(value) for name, value in parsed["tensors"].items()}
    expected = set(module.state_dict())
    tied = set(module.all_tied_weights_keys) if config.tie_word_embeddings else set()
    missing = expected - set(tensors) - tied
    if missing:
        raise lacks(gguf, config, missing)
    module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    module.save_pretrained(str(out))
    _parse.cache_clear()  # the weights were the last to be asked of it


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Meanwhile the file is parsed once at most, and what libraries say of it becomes a ModelError."""
    try:
        with _parsed_once():
            yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model: {gguf} cannot be read as a GGUF model: {in_words(error)}; it may be cut short: fetch it "
            "anew"
        ) from error


def _reader(gguf: Path) -> Any:
    import gguf as library

    reader_of: Any = library  # its types do not foresee another reader
    return reader_of.GGUFReader(str(gguf))


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a file anew for its configuration, tokenizer and weights, which takes seconds."""
    import gguf

    library: Any = gguf  # its types do not foresee this
    parser = library.GGUFReader
    library.GGUFReader = lambda path, *_: _parse(parser, str(path), Identity.of(Path(path)))
    try:
        yield
    finally:
        library.GGUFReader = parser


@functools.lru_cache(maxsize=1)
def _parse(parser: Any, path: str, _file: Identity) -> Any:
    return parser(path)
