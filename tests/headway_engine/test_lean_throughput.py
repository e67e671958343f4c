"""The throughput script for accelerators, run on a CPU with a tiny model: it works before one is there."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_every_runner_is_measured_and_the_page_is_written(tmp_path: Path) -> None:
    """Each runner at each batch, and the burst through the scheduler; the peer is left to the device."""
    page = tmp_path / "folder" / "page.md"
    command = [
        *(sys.executable, str(ROOT / "tests" / "gpu" / "throughput.py"), "--device", "cpu", "--no-peer"),
        *("--model", "random://llama?hidden=32&heads=4&kv_heads=2&layers=2&vocab=300&context=128"),
        *("--dtype", "float32", "--batches", "1,3", "--context", "40", "--steps", "2", "--requests", "2"),
        *("--prompt", "20", "--output", "4", "--copy-bytes", "100000", "--out", str(page)),
    ]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=200)
    lines = page.read_text().splitlines()
    rows = [line.split(" | ")[:2] for line in lines if line.startswith(("| transformers", "| lean"))]
    assert rows == [
        [f"| {name}", str(batch)]
        for name in (
            "transformers, torch",
            "transformers, torch",
            "lean, torch, no graphs",
            "lean, torch, graphs",
        )
        for batch in (1, 3)
    ]
    assert any(line.startswith("| Headway (lean, torch attention") for line in lines)
    assert torch.__version__ in "\n".join(lines)
