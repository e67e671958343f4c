"""Weights in fewer bits: what a checkpoint names, and what can be asked for while a model is read.

The work is done by transformers and the library of each method, and transformers says which library is not
there. torchao is in no extra: once installed, transformers imports it at every start, quantized or not, which
takes seconds. Knows nothing of files and of runners.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from headway_engine.config import QUANTIZATIONS
from headway_engine.model_error import ModelError


def named_method(config: Mapping[str, Any]) -> str:
    """The method in a config.json's quantization_config; empty when there is none. Raises ModelError."""
    said = config.get("quantization_config") or {}
    if not isinstance(said, Mapping):
        raise ModelError("model: quantization_config in config.json is not an object")
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        return "bitsandbytes"  # as older checkpoints have it, without a quant_method
    return str(said.get("quant_method", ""))


def on_the_fly(name: str, config: Mapping[str, Any]) -> Any:
    """The configuration with which transformers packs weights while it reads them. Raises ModelError."""
    if method := named_method(config):
        raise ModelError(
            f"quantization: the model's weights are quantized already ({method}); leave --quantization out"
        )
    if name not in QUANTIZATIONS:
        raise ModelError(f"quantization: {name!r}; use {' or '.join(QUANTIZATIONS)}")
    if importlib.util.find_spec("torchao") is None:
        raise ModelError(f"quantization: {name} needs the package torchao; install it (pip install torchao)")
    from transformers import TorchAoConfig

    torchao: Any = importlib.import_module("torchao.quantization")
    return TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
