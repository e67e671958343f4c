"""What a model's folder says of its embeddings, in sentence-transformers' files and in its configuration.

Which pooling the model was trained for, to which sizes its vectors may be cut, and why it should give none.
Knows nothing of torch, and of whether the runner can give hidden states.
"""

import json
from pathlib import Path
from typing import Any

from headway_engine.messages import Embeddings, NoEmbeddings
from headway_engine.sequence import Pooling

_HANDLED = frozenset(("Transformer", "Pooling", "Normalize"))
_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
}


def embeddings_of(folder: Path | None, wanted: str, dimensions: int) -> Embeddings | NoEmbeddings:
    """Embeddings of a model whose runner gives hidden states of so many dimensions (0: none).

    `wanted` is `auto`, `last` or `mean`; `auto` follows the folder, and means `last` where there is none or
    it says nothing.
    """
    if not dimensions:
        return NoEmbeddings("its runner hands out no hidden states; with another --runner it may")
    parts = _list(folder, "modules.json")
    kinds = {str(part.get("type", "")).rsplit(".", 1)[-1] for part in parts if isinstance(part, dict)}
    if other := kinds - _HANDLED:
        return NoEmbeddings(f"its vectors go through {', '.join(sorted(other))}, which is not handled here")
    pooling = _said(_object(folder, "1_Pooling/config.json")) if wanted == "auto" else Pooling(wanted)
    if isinstance(pooling, NoEmbeddings):
        return pooling
    config = _object(folder, "config.json")
    cuts = config.get("matryoshka_dimensions")
    return Embeddings(
        pooling=pooling,
        dimensions=dimensions,
        cuts=tuple(c for c in cuts if isinstance(c, int)) if isinstance(cuts, list) else (),
        any_cut=config.get("is_matryoshka") is True and not cuts,
    )


def _said(config: dict[str, Any]) -> Pooling | NoEmbeddings:
    """The pooling that sentence-transformers' file names: one flag of many, or one word."""
    mode = config.get("pooling_mode")
    named = [mode] if isinstance(mode, str) else []
    named += [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if not named:
        return Pooling.LAST
    if len(named) > 1 or named[0] not in _MODES:
        return NoEmbeddings(
            f"it was made for the pooling {' and '.join(named)}, which is not handled here; the engine's "
            "option --pooling chooses another"
        )
    return _MODES[named[0]]


def _object(folder: Path | None, name: str) -> dict[str, Any]:
    found = _read(folder, name)
    return found if isinstance(found, dict) else {}


def _list(folder: Path | None, name: str) -> list[Any]:
    found = _read(folder, name)
    return found if isinstance(found, list) else []


def _read(folder: Path | None, name: str) -> Any:
    if folder is None or not (folder / name).is_file():
        return None
    try:
        return json.loads((folder / name).read_text("utf-8"))
    except ValueError:
        return None
