"""What is fixed until the engine restarts, and how it stands on the command line.

The controller writes these arguments into the pod template; `Limits` (see `protocol`) is what can change
while the engine runs. No field is in both. Knows nothing of HTTP and torch.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from headway_engine.logs import FORMAT_ENV, LogFormat
from headway_engine.protocol import MANAGEMENT_PORT, PUBLIC_PORT

QUANTIZATIONS = ("int8wo",)
"""Ways to pack weights while they are read. int8wo: 8-bit integers with one scale a row."""

ATTENTIONS = ("auto", "flash-attn-3", "flash-attn-2", "torch-varlen", "triton", "torch")
"""Kernels of paged attention on an accelerator; `torch` copies contexts and needs nothing."""

_MOST = 1 << 31
_RANGES: dict[str, tuple[float, int]] = {
    "max_model_len": (0, _MOST),
    "port": (1, 65_535),
    "management_port": (1, 65_535),
    "capacity_max_batch_tokens": (1, _MOST),
    "capacity_max_batch_sequences": (1, _MOST),
    "kv_memory_percent": (1, 98),
    "kv_block_tokens": (1, _MOST),
    "kv_blocks": (0, _MOST),
    "drain_timeout_s": (0, 86_400),
    "stall_limit_s": (0.1, 86_400),
    "threads": (0, 4_096),
}
"""What each number may be, from and to. A stall limit of nothing would have the engine restarted at the first
request; clocks take neither infinity nor what is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that needs a restart to change. Sizes are in tokens, sequences, blocks or seconds."""

    model: str  # hf:// | file:/// | package://MODULE/FILE | random://ARCH?...
    revision: str = "main"
    served_model_name: str = ""  # empty: the last part of the model URI
    max_model_len: int = 0  # 0: the model's own limit
    dtype: str = "auto"
    quantization: str = ""  # one of QUANTIZATIONS; empty: weights as the checkpoint has them
    device: str = "auto"
    runner: str = "auto"
    attention: str = "auto"  # one of ATTENTIONS
    decode_graphs: bool = True
    host: str = "0.0.0.0"
    port: int = PUBLIC_PORT
    management_port: int = MANAGEMENT_PORT
    capacity_max_batch_tokens: int = 8192
    capacity_max_batch_sequences: int = 256
    kv_memory_percent: int = 90
    kv_block_tokens: int = 16
    kv_blocks: int = 0  # 0: from memory; otherwise exactly this many
    prefix_caching: bool = True
    pooling: str = "auto"
    limits_file: Path | None = None
    objectives_file: Path | None = None
    tenants_file: Path | None = None
    keys_file: Path | None = None
    drain_timeout_s: float = 60.0
    stall_limit_s: float = 60.0
    threads: int = 0  # 0: all cores that the process may use
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT
    access_log: bool = False


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m headway_engine`; one option per field of EngineConfig."""
    p = argparse.ArgumentParser(
        prog="headway-engine",
        description="OpenAI-compatible engine with live batching limits",
        allow_abbrev=False,  # the controller refuses options by name; a shortened one must not slip through
    )
    d = EngineConfig(model="")
    p.add_argument(
        "--model",
        required=True,
        help="hf://ORG/NAME, file:///PATH, package://MODULE/FILE or random://ARCH?...",
    )
    p.add_argument("--revision", default=d.revision, help="branch, tag or commit of an hf:// model")
    p.add_argument(
        "--served-model-name",
        default=d.served_model_name,
        help="name in the API; default: last part of the URI",
    )
    p.add_argument(
        "--max-model-len",
        type=int,
        default=d.max_model_len,
        help="tokens of prompt and output together; 0: the model's limit",
    )
    p.add_argument("--dtype", default=d.dtype, choices=["auto", "float32", "bfloat16", "float16"])
    p.add_argument(
        "--quantization",
        default=d.quantization,
        choices=["", *QUANTIZATIONS],
        help="pack weights to 8 bits; needs the package torchao, but for Llama shapes on a CPU",
    )
    p.add_argument("--device", default=d.device, help="auto, cpu, cuda or cuda:N")
    p.add_argument("--runner", default=d.runner, choices=["auto", "transformers", "fused", "lean"])
    p.add_argument(
        "--attention",
        default=d.attention,
        choices=ATTENTIONS,
        help="kernel of paged attention on an accelerator; auto: the first that is installed and works",
    )
    p.add_argument(
        "--decode-graphs",
        action=argparse.BooleanOptionalAction,
        default=d.decode_graphs,
        help="record decode steps at start and replay them, where the device can",
    )
    p.add_argument("--host", default=d.host)
    p.add_argument("--port", type=int, default=d.port, help="OpenAI API")
    p.add_argument(
        "--management-port", type=int, default=d.management_port, help="metrics, health, control API"
    )
    p.add_argument(
        "--capacity-max-batch-tokens",
        type=int,
        default=d.capacity_max_batch_tokens,
        help="largest step that can ever be set",
    )
    p.add_argument("--capacity-max-batch-sequences", type=int, default=d.capacity_max_batch_sequences)
    p.add_argument(
        "--kv-memory-percent",
        type=int,
        default=d.kv_memory_percent,
        help="share of free memory for weights and KV cache",
    )
    p.add_argument("--kv-block-tokens", type=int, default=d.kv_block_tokens)
    p.add_argument(
        "--kv-blocks", type=int, default=d.kv_blocks, help="exact number of KV blocks; 0: from memory"
    )
    p.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=d.prefix_caching)
    p.add_argument(
        "--pooling",
        default=d.pooling,
        choices=["auto", "last", "mean"],
        help="embeddings: the last token's hidden state or the mean of all; auto: as the model's folder says",
    )
    p.add_argument("--limits-file", type=Path, default=d.limits_file, help="JSON of Limits to start with")
    p.add_argument(
        "--objectives-file", type=Path, default=d.objectives_file, help="JSON of Objectives to start with"
    )
    p.add_argument(
        "--tenants-file",
        type=Path,
        default=d.tenants_file,
        help="JSON of the tenants' weights, priorities, caps",
    )
    p.add_argument(
        "--keys-file",
        type=Path,
        default=d.keys_file,
        help="JSON object, API key to tenant, or a folder with a file of keys for each tenant; with it, "
        "the API needs one of the keys, and a change is taken in while the engine runs",
    )
    p.add_argument(
        "--drain-timeout-s",
        type=float,
        default=d.drain_timeout_s,
        help="how long running requests may go on after SIGTERM",
    )
    p.add_argument(
        "--stall-limit-s",
        type=float,
        default=d.stall_limit_s,
        help="requests pending and no step finished for so long: /healthz turns red",
    )
    p.add_argument("--threads", type=int, default=d.threads, help="compute threads; 0: all usable cores")
    p.add_argument("--log-level", default=d.log_level, choices=["debug", "info", "warning", "error"])
    p.add_argument(
        "--log-format",
        type=LogFormat,
        default=os.environ.get(FORMAT_ENV) or d.log_format,
        choices=list(LogFormat),
        help=f"text for people, json for collectors; default: {FORMAT_ENV}, or text",
    )
    p.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=d.access_log,
        help="a line at level info for each request when it is over",
    )
    return p


def parse(argv: list[str]) -> EngineConfig:
    """EngineConfig from arguments; argparse exits with a message on bad ones."""
    p = parser()
    config = EngineConfig(**vars(p.parse_args(argv)))
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name)
        if not least <= value <= most:  # what is no number is in no range
            p.error(f"--{name.replace('_', '-')} must be between {least:g} and {most}, and is {value}")
    if config.port == config.management_port:
        p.error("--port and --management-port must differ: the control API is not for clients")
    if config.capacity_max_batch_tokens < config.capacity_max_batch_sequences:
        p.error("--capacity-max-batch-tokens must not be below --capacity-max-batch-sequences")
    return config


def served_name(config: EngineConfig) -> str:
    """The model's name in the API: the given one, or the last part of the URI."""
    if config.served_model_name:
        return config.served_model_name
    scheme, _, rest = config.model.partition("://")
    name = rest.partition("?")[0].rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return f"random-{name}" if scheme == "random" else name
