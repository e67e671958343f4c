"""A folder's tokenizer as the front end reads it: a tokenizer.json, converted once where there is none.

transformers reads the older forms (vocab.json with merges.txt, SentencePiece models) and writes the new one.
Knows nothing of caches and locks; needs transformers only to convert.
"""

import hashlib
from pathlib import Path
from typing import Any

from headway_engine.model_error import ModelError, in_words

FAST = "tokenizer.json"
_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Every file of a repository that is no weights."""
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".ot")
)
"""What no tokenizer is in, and is too large to read for one."""
_LARGEST_BYTES = 256 << 20
"""No tokenizer's file is so large; the largest vocabularies take some tens of MiB."""


def has_any(folder: Path) -> bool:
    """There is a tokenizer in some form."""
    return any((folder / name).is_file() for name in (FAST, "tokenizer_config.json", *_VOCABULARIES))


def digest(folder: Path) -> str:
    """Changes with the content of every file that a conversion may read: all that are no weights, in the
    folder and in its folder of further chat templates."""
    found = hashlib.sha256()
    files = [path for path in (*folder.iterdir(), *(folder / _TEMPLATES).glob("*")) if path.is_file()]
    for path in sorted(files):
        if path.suffix in _WEIGHTS or path.stat().st_size > _LARGEST_BYTES:
            continue
        name = str(path.relative_to(folder)).encode()
        content = path.read_bytes()
        found.update(f"{len(name)} {len(content)} ".encode() + name + content)
    return found.hexdigest()


def convert(folder: Path, out: Path) -> None:
    """Save the folder's tokenizer and chat template under `out`, with tokenizer.json. Raises ModelError."""
    import transformers

    auto: Any = transformers.AutoTokenizer  # carries no types
    try:
        tokenizer = auto.from_pretrained(str(folder), local_files_only=True)
        tokenizer.save_pretrained(str(out))
    except ImportError as error:
        raise ModelError(
            f"model: the tokenizer in {folder} needs a package that is not installed: {in_words(error, 300)}"
        ) from error
    except Exception as error:
        raise ModelError(
            f"model: the tokenizer in {folder} cannot be read: {in_words(error, 300)}"
        ) from error
    if not (out / FAST).is_file():
        raise ModelError(
            f"model: the tokenizer in {folder} ({type(tokenizer).__name__}) cannot be made into a {FAST}; "
            "take a copy of the model that has one"
        )
