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


def has_any(folder: Path) -> bool:
    """There is a tokenizer in some form."""
    return any((folder / name).is_file() for name in (FAST, "tokenizer_config.json", *_VOCABULARIES))


def digest(folder: Path) -> str:
    """Changes with every file that a conversion may read."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SMALL for path in folder.glob(pattern)}):
        found.update(f"{path.name} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


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
