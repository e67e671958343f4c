"""Engines whose model is the toy of `support.fake_engine`, as several test modules start them."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

from support import fake_engine
from support.engine_server import Engine, engine_server


def slow(folder: Path) -> AbstractContextManager[Engine]:
    """A step takes 20 ms, only two sequences run at once, and four may wait."""
    limits = folder / "limits.json"
    limits.write_text(
        json.dumps({"max_batch_sequences": 2, "max_queued_requests": 4, "max_batch_tokens": 64})
    )
    return engine_server(
        folder,
        arguments=["--limits-file", str(limits)],
        command=fake_engine.COMMAND,
        env={"FAKE_STEP_S": "0.02"},
    )
