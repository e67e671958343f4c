"""Where a model comes from: a URI becomes a folder with its tokenizer and, later, one with its weights.

`resolve` is light: it fetches or converts what a tokenizer needs, never the weights. `weights_folder` does
the rest. What is converted is kept in the cache under a digest of what it was made from, never under a name.
Both may run in several processes at once (`drafts`). Knows nothing of torch at import time.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, product
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from headway_engine import drafts, file_digest, tokenizer_files
from headway_engine.hub import snapshot
from headway_engine.model_error import ModelError

__all__ = ["ModelError", "ModelSource", "SourceKind", "default_cache_dir", "resolve", "weights_folder"]

BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCABULARY = len(BYTE_SPECIALS) + 256
_CACHE_VERSION = "3"  # part of every name in the cache: raise it when a converter changes

_WEIGHT_HF_FILES = (*tokenizer_files.SMALL, "*.safetensors")
_OTHER_COPIES = ("*/*.safetensors", "*/*.bin", "consolidated*", "training_args.bin")
"""The same weights in other forms, which some repositories carry beside them."""

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class SourceKind(Enum):
    """What stands behind a URI."""

    HUB = "hub"
    FOLDER = "folder"
    GGUF = "gguf"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class RandomShape:
    """A model made from a configuration and a seed. Sizes are in units of the model; `context` in tokens."""

    architecture: str
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 0  # 0: as many as heads
    intermediate: int = 0  # 0: three times hidden
    vocab: int = 512
    context: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved URI. `tokenizer_dir` works with AutoTokenizer.from_pretrained; None when there is none."""

    uri: str
    revision: str
    kind: SourceKind
    cache_dir: Path
    tokenizer_dir: Path | None
    path: Path | None = None  # the folder or GGUF file
    content: file_digest.Content | None = None  # of the GGUF file
    repository: str = ""
    shape: RandomShape | None = field(default=None)

    @property
    def name(self) -> str:
        """The last part of the URI without its suffix: the default served model name."""
        if self.shape is not None:
            return f"random-{self.shape.architecture}"
        return Path(self.repository or str(self.path)).name.removesuffix(".gguf")


def default_cache_dir() -> Path:
    """HEADWAY_CACHE, else $XDG_CACHE_HOME/headway, else ~/.cache/headway."""
    if explicit := os.environ.get("HEADWAY_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


def _quiet(_: str) -> None:
    """Progress that nobody wants to hear of."""


def resolve(
    uri: str, revision: str, cache_dir: Path, progress: Callable[[str], None] = _quiet
) -> ModelSource:
    """The source behind a model URI, its tokenizer ready to load. Raises ModelError.

    First clears the cache of what killed processes left half-made.
    """
    drafts.sweep(cache_dir)
    parts = urlsplit(uri)
    match parts.scheme:
        case "hf":
            return _resolve_hub(uri, unquote(parts.netloc + parts.path), revision, cache_dir, progress)
        case "file":
            if parts.netloc not in ("", "localhost"):
                raise ModelError(
                    f"model: {uri!r} has a host in it; a file URI has three slashes: file:///PATH"
                )
            return _resolve_path(uri, Path(unquote(parts.path)), revision, cache_dir, progress)
        case "package":
            path = _packaged_file(uri, parts.netloc, unquote(parts.path).lstrip("/"))
            return _resolve_path(uri, path, revision, cache_dir, progress)
        case "random":
            shape = _random_shape(uri, parts.netloc, parts.query)
            folder = drafts.once(
                cache_dir / "tokenizers" / f"bytes-{shape.vocab}-v{_CACHE_VERSION}",
                lambda out: _write_byte_tokenizer(out, shape.vocab),
            )
            return ModelSource(uri, revision, SourceKind.RANDOM, cache_dir, folder, shape=shape)
    raise ModelError(
        f"model: {uri!r} is no model URI; use hf://ORG/NAME, file:///PATH, package://MODULE/FILE.gguf or "
        "random://ARCH?hidden=64&layers=2"
    )


def weights_folder(source: ModelSource, progress: Callable[[str], None]) -> Path:
    """A Hugging Face folder with configuration and weights (not for random models). Raises ModelError."""
    if source.kind is SourceKind.HUB:
        assert source.path is not None
        # The commit that the tokenizer came from: the branch may have moved since.
        commit, repository = source.path.name, source.repository
        progress(f"fetching {repository} at {source.revision} ({commit[:12]})")
        folder = snapshot(repository, commit, _WEIGHT_HF_FILES, progress, ignore=_OTHER_COPIES)
        if not any(folder.glob("*.safetensors")):
            folder = snapshot(
                repository, commit, ("*.bin", "*.bin.index.json"), progress, ignore=_OTHER_COPIES
            )
        return folder
    assert source.path is not None
    if source.kind is SourceKind.FOLDER:
        return source.path
    assert source.content is not None
    gguf, content = source.path, source.content

    def convert(out: Path) -> None:
        from headway_engine.gguf_model import unpacked_bytes, write_weights

        needed = unpacked_bytes(gguf)
        progress(
            f"converting {gguf.name} to {needed / (1 << 30):.2f} GiB (once; later starts read the cache)"
        )
        with drafts.room_for(f"{gguf.name}, unpacked to float16,", out.parent, needed):
            write_weights(gguf, out)
        # What is kept for ever is worth a second reading: a file's times do not tell of every write.
        if not file_digest.same_bytes(content):
            raise _changed(gguf)

    return drafts.once(gguf_cache(source.content, source.cache_dir) / "weights", convert)


def must_be_unchanged(source: ModelSource, *, kept: bool = True) -> None:
    """Raises ModelError for a file that changed since it was resolved. `kept`: what was made of it is kept
    for later starts, so that its very bytes must be those."""
    assert source.path is not None
    assert source.content is not None
    ask = file_digest.unchanged if kept else file_digest.untouched
    if not ask(source.content):
        raise _changed(source.path)


def _resolve_path(
    uri: str, path: Path, revision: str, cache_dir: Path, progress: Callable[[str], None]
) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: {path} has no config.json; give the folder that holds it")
        return ModelSource(
            uri, revision, SourceKind.FOLDER, cache_dir, _tokenizer_folder(path, cache_dir), path=path
        )
    if not path.is_file():
        raise ModelError(f"model: there is nothing at {path} ({uri})")
    if path.suffix != ".gguf":
        raise ModelError(f"model: {path} is neither a Hugging Face folder nor a .gguf file")
    content = file_digest.content_of(path, cache_dir / "digests", progress)

    def convert(out: Path) -> None:
        from headway_engine.gguf_model import write_tokenizer

        write_tokenizer(path, out)
        if not file_digest.unchanged(content):
            raise _changed(path)

    folder = drafts.once(gguf_cache(content, cache_dir) / "tokenizer", convert)
    return ModelSource(uri, revision, SourceKind.GGUF, cache_dir, folder, path=path, content=content)


def _changed(what: Path) -> ModelError:
    return ModelError(
        f"model: {what} changed while it was read, and nothing of that was kept; start again when it is whole"
    )


def _packaged_file(uri: str, module: str, name: str) -> Path:
    """A file inside an installed package, found without importing it (its imports may be missing)."""
    if not module.isidentifier() or not name:
        raise ModelError(f"model: {uri!r} must look like package://MODULE/FILE.gguf")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model: package {module!r} is not installed; install the distribution that ships {name}, or use "
            "another URI"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        shipped = ", ".join(sorted(p.name for p in root.glob("*.gguf"))) or "none"
        raise ModelError(f"model: package {module!r} has no file {name!r}; GGUF files in it: {shipped}")
    return path


def _resolve_hub(
    uri: str, repository: str, revision: str, cache_dir: Path, progress: Callable[[str], None]
) -> ModelSource:
    repository = repository.strip("/")
    if not 1 <= len(repository.split("/")) <= 2 or not repository:
        raise ModelError(f"model: {uri!r} must look like hf://ORG/NAME")
    folder = snapshot(repository, revision, tokenizer_files.SMALL, progress)
    tokenizer = _tokenizer_folder(folder, cache_dir)
    return ModelSource(
        uri, revision, SourceKind.HUB, cache_dir, tokenizer, path=folder, repository=repository
    )


def _tokenizer_folder(folder: Path, cache_dir: Path) -> Path | None:
    """Where the tokenizer.json is: beside the weights, or converted into the cache; None when nowhere."""
    if (folder / tokenizer_files.FAST).is_file():
        return folder
    if not tokenizer_files.has_any(folder):
        return None
    digest = tokenizer_files.digest(folder)

    def convert(out: Path) -> None:
        tokenizer_files.convert(folder, out)
        if tokenizer_files.digest(folder) != digest:
            raise _changed(folder)

    return drafts.once(cache_dir / "tokenizers" / f"{digest}-v{_CACHE_VERSION}", convert)


def _random_shape(uri: str, architecture: str, query: str) -> RandomShape:
    values: dict[str, int] = {}
    known = [f for f in RandomShape.__dataclass_fields__ if f != "architecture"]
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise ModelError(f"model: {uri!r}: unknown parameter {name!r}; known: {', '.join(known)}")
        try:
            values[name] = int(text)
        except ValueError:
            raise ModelError(f"model: {uri!r}: {name} must be a whole number, not {text!r}") from None
    shape = RandomShape(architecture, **values)
    if shape.vocab < BYTE_VOCABULARY:
        raise ModelError(
            f"model: {uri!r}: vocab must be at least {BYTE_VOCABULARY} (256 bytes and three specials)"
        )
    smallest = min(shape.hidden, shape.layers, shape.heads, shape.context)
    if smallest < 1 or shape.hidden % shape.heads or shape.heads % (shape.kv_heads or shape.heads):
        raise ModelError(
            f"model: {uri!r}: sizes must be positive, hidden a multiple of heads, heads of kv_heads"
        )
    return shape


def _write_byte_tokenizer(out: Path, vocab: int) -> None:
    """A tokenizer with one token a byte. Ids past the bytes stand for made-up words, so that whatever a
    random model says can be read; encoding never yields them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(letters) for letters in product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    pieces = [*BYTE_SPECIALS, *alphabet, *islice(words, vocab - BYTE_VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in BYTE_SPECIALS])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BYTE_SPECIALS[0],
                "eos_token": BYTE_SPECIALS[2],
                "pad_token": BYTE_SPECIALS[0],
                "clean_up_tokenization_spaces": False,
                "chat_template": _CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def gguf_cache(content: file_digest.Content, cache_dir: Path) -> Path:
    """The cache folder of a GGUF file, named by its content: the same bytes elsewhere have the same one."""
    return cache_dir / "models" / f"{content.digest}-v{_CACHE_VERSION}"
