"""A GGUF file as a Hugging Face folder: tokenizer first (quick), weights later (unpacked to float16).

transformers reads the format; its `from_pretrained` would keep the weights packed, so the state dict is
loaded here. float16 holds what a 4-bit file knows, in half the space of float32.
The file is parsed once for all of it. Knows nothing of caches and locks.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway_engine.file_digest import Identity
from headway_engine.gguf_rope import add_rope_scaling
from headway_engine.model_error import ModelError, in_words

_BYTES_OF_FLOAT16 = 2


def write_tokenizer(gguf: Path, out: Path) -> None:
    """Save the file's tokenizer and chat template under `out`."""
    from transformers import AutoTokenizer

    try:
        with parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:
        raise ModelError(
            f"model: the tokenizer in {gguf} cannot be read: {in_words(error)}; the file may be cut "
            "short: fetch it anew"
        ) from error
    tokenizer.save_pretrained(str(out))


def unpacked_bytes(gguf: Path) -> int:
    """What the weights take when they are unpacked. Raises ModelError."""
    import gguf as library

    reader_of: Any = library  # its types do not foresee another reader
    try:
        with parsed_once():
            tensors = reader_of.GGUFReader(str(gguf)).tensors
    except Exception as error:
        raise ModelError(
            f"model: {gguf} cannot be read as a GGUF model: {in_words(error)}; it may be cut short: fetch it "
            "anew"
        ) from error
    return sum(int(tensor.n_elements) for tensor in tensors) * _BYTES_OF_FLOAT16


def write_weights(gguf: Path, out: Path) -> None:
    """Save configuration, generation configuration and unpacked weights under `out`."""
    import gguf as library
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    auto: Any = transformers  # neither carries types
    reader: Any = modeling_gguf_pytorch_utils
    reader_of: Any = library

    try:
        with parsed_once():
            config = auto.AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            file = reader_of.GGUFReader(str(gguf))
            add_rope_scaling(config, file, str(file.fields["general.architecture"].contents()))
            with torch.device("meta"):
                module = auto.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
            parsed = reader.load_gguf_checkpoint(
                str(gguf), return_tensors=True, model_to_load=module, torch_dtype=torch.float16
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model: {gguf} cannot be read as a GGUF model: {error}") from error
    tensors = {name: torch.as_tensor(value) for name, value in parsed["tensors"].items()}
    expected = set(module.state_dict())
    tied = set(module.all_tied_weights_keys) if config.tie_word_embeddings else set()
    missing = expected - set(tensors) - tied
    if missing:
        raise ModelError(f"model: {gguf} lacks weights of {config.model_type}: {sorted(missing)[:5]}")
    module.load_state_dict(tensors, strict=False, assign=True)
    module.tie_weights()
    module.save_pretrained(str(out))
    _parse.cache_clear()  # the weights were the last to be asked of it


@contextmanager
def parsed_once() -> Iterator[None]:
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
