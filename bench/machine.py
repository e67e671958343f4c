"""What a table must say of the machine it was made on: the CPU, its cores, and how busy it was."""

import os
import platform
from pathlib import Path


def spin_as_the_engine() -> None:
    """Have OpenMP's threads spin as in the engine's core. To be called before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def cpu_words() -> str:
    """The CPU's name, its cores and the instruction sets that matter here."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next(
        (line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    sets = [s for s in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {s} " in info.replace("\n", " ")]
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {' '.join(sets)}"


def conditions(model: str = "SmolLM2-135M-Instruct") -> str:
    """Model, CPU and load average (1, 5, 15 minutes), for the line above a table."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{model}, {cpu_words()}, load average {load}"
