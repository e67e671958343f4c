"""Files of a model out of a Hugging Face hub, into its cache: progress in bytes, and failures in words.

The hub library fetches, retries and renames; here its errors become sentences that name the setting, and what
a killed download left behind is cleared. Tokens are never part of a text. Knows nothing of what files mean.
"""

import fcntl
import importlib
import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway_engine.drafts import is_disk_full
from headway_engine.model_error import ModelError, in_words

_GIB = 1 << 30
PROGRESS_EVERY_S = 5.0
STALE_AFTER_S = 600.0
"""A part of a file that nobody wrote to for so long, and nobody holds the lock of, was left by a killed
process. The lock alone would do, were it not for shared file systems that grant it to everyone."""


def snapshot(
    repository: str,
    revision: str,
    patterns: Sequence[str],
    progress: Callable[[str], None],
    *,
    ignore: Sequence[str] = (),
    progress_every_s: float = PROGRESS_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """The folder of a revision with the files that match, fetched or out of the cache. Raises ModelError.

    Its name is the commit: the same call with that as `revision` cannot yield another one.
    """
    from huggingface_hub import constants, errors, snapshot_download

    clear_stale(Path(constants.HF_HUB_CACHE), repository)
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
                tqdm_class=_bar(repository, progress, progress_every_s, clock),
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model: {repository} is gated; accept its terms on the hub and set HF_TOKEN (hfTokenSecretRef)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"model: the hub knows no {repository}, or the token may not see it; check the name and HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"revision: {repository} has no revision {revision!r}") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(_refused(repository, error.response.status_code)) from error
    except errors.IncompleteSnapshotError as error:
        raise ModelError(
            f"model: {repository} is in the hub cache only in part, and the hub cannot be reached for the "
            "rest; check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    except Exception as error:
        if is_disk_full(error):
            raise ModelError(
                f"model: {repository} did not fit in {constants.HF_HUB_CACHE}; give that a larger volume "
                "(HF_HOME names the folder; in a resource, spec.podTemplate mounts a volume at /cache)"
            ) from error
        if isinstance(error.__cause__, errors.HfHubHTTPError):  # the library looked into the cache after it
            raise ModelError(_refused(repository, error.__cause__.response.status_code)) from error
        why = in_words(error, secrets=_tokens())
        raise ModelError(
            f"model: {repository} could not be fetched and is not in the hub cache: {why}; "
            "check the network, HF_ENDPOINT and HF_HOME, or use file:///PATH"
        ) from error


def clear_stale(
    cache: Path, repository: str, *, older_than_s: float = STALE_AFTER_S, now_s: float | None = None
) -> None:
    """Remove parts of files that a killed process left: each start would leave another one, till the volume
    is full. A download that is going on holds its file's lock."""
    name = "models--" + repository.replace("/", "--")
    now = time.time() if now_s is None else now_s
    for part in (cache / name / "blobs").glob("*.incomplete"):
        lock = cache / ".locks" / name / f"{part.name.split('.', 1)[0]}.lock"
        try:
            if now - part.stat().st_mtime < older_than_s:
                continue
            lock.parent.mkdir(parents=True, exist_ok=True)
            with lock.open("a") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink(missing_ok=True)
        except OSError:  # somebody's, or a cache that is not ours to write
            continue


def _refused(repository: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"model: the hub refused the token for {repository} (HTTP {status}); check HF_TOKEN "
            "(hfTokenSecretRef): it may be wrong, expired, or without the right to read"
        )
    return (
        f"model: the hub answered HTTP {status} for {repository}, and it is not in the hub cache; "
        "try again later, or use file:///PATH"
    )


def _tokens() -> list[str]:
    """What no message may hold."""
    return [token for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if (token := os.environ.get(name))]


def _bar(repository: str, progress: Callable[[str], None], every_s: float, clock: Callable[[], float]) -> Any:
    """A progress bar for the hub library that draws nothing, and tells of the bytes on disk."""
    tqdm: Any = importlib.import_module("tqdm.std").tqdm  # it carries no types

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0
        told_s = clock()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = "econstruct" in str(kwargs.get("desc", ""))
            kwargs.pop("name", None)
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "disable": False}))

        def display(self, *_: Any, **__: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.counts_bytes and self.total and (now_s := clock()) - Bar.told_s >= every_s:
                Bar.told_s = now_s
                progress(f"fetching {repository}: {self.n / _GIB:.2f} of {self.total / _GIB:.2f} GiB")
            return shown

    return Bar
