"""The engine core as a process: load the model, then turn the loop, talking over an inherited socket.

Started by the API front end as `python -m headway_engine.core_process FD ARGUMENTS...`. It lives exactly as
long as the front end does: the end of the channel ends it, whatever it is doing, and signals are left
to the front end (a terminal or a container runtime may send them to the whole process group).
"""

import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headway_engine import channel, config, logs
from headway_engine.limits import differences
from headway_engine.loop import Inbox, Loop, Run, Scheduler
from headway_engine.messages import Died, Loading, Ready
from headway_engine.model_error import ModelError
from headway_engine.preparation import Prepare
from headway_engine.protocol import Capacity, Limits, check_limits, clamp_limits
from headway_engine.tenants import TenantPolicy

log = logging.getLogger("headway.core")


@dataclass(frozen=True, slots=True)
class Core:
    """Everything that loading yields."""

    scheduler: Scheduler
    run: Run
    ready: Ready
    prepare: Prepare | None = None  # for requests with a grammar
    disproof: Callable[[], str] | None = None  # takes minutes; why this core must not go on, or nothing


Load = Callable[[Callable[[str], None]], Core]
"""Builds the core; is given a function that tells the front end what it is doing."""


def serve(sock: socket.socket, load: Load) -> int:
    """Load, then turn until told to stop; the exit status. Commands that come before Ready wait."""
    end = channel.CoreEnd(sock)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(end, inbox), name="inbox", daemon=True).start()
    try:
        core = load(lambda what: end.send(Loading(what)))
        end.send(core.ready)
        if core.disproof is not None:
            watch = threading.Thread(target=_end_if, args=(core.disproof, end), name="disproof", daemon=True)
            watch.start()
        limits = core.ready.limits
        Loop(core.scheduler, core.run, end.send, limits=limits, inbox=inbox, prepare=core.prepare).run()
    except channel.ChannelClosed:
        log.warning(logs.fields("front-end-gone"))
    except ModelError as error:
        # A setting to be changed, and said in words; where the code was says nothing to whoever set it.
        log.error(logs.fields("core-cannot-start", reason=str(error)))
        end.send(Died(message=str(error)))
        return 1
    except Exception as error:
        log.exception(logs.fields("core-died"))
        end.send(Died(message=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _receive(end: channel.CoreEnd, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(end.receive())
    except channel.ChannelClosed:
        # The front end is gone and nobody reads any more: do not finish loading, or the step.
        os._exit(0)
    except BaseException:
        # Without a reader of commands no request would ever be heard of again.
        log.exception(logs.fields("inbox-died"))
        os._exit(1)


def _end_if(disproof: Callable[[], str], end: channel.CoreEnd) -> None:
    """End the process when what it serves turns out to be wrong: at once, since whatever is still answered
    would be wrong too. Whoever starts it again gets the right thing."""
    try:
        reason = disproof()
    except Exception:
        log.exception(logs.fields("disproof-failed"))
        return
    if not reason:
        return
    log.error(logs.fields("core-disproved", reason=reason))
    try:
        end.send(Died(message=reason))
    finally:
        logging.shutdown()
        os._exit(1)


def starting_limits(settings: config.EngineConfig, capacity: Capacity) -> Limits:
    """Limits of the file, or the defaults, brought below capacity; every clamp is one log line.

    Raises InvalidLimits or msgspec.DecodeError for a file that says something else.
    """
    limits = Limits()
    if settings.limits_file is not None:
        limits = msgspec.json.decode(settings.limits_file.read_bytes(), type=Limits)
    clamped = clamp_limits(limits, capacity)
    for name, wanted, now in differences(limits, clamped):
        log.warning(logs.fields("limit-clamped", limit=name, wanted=wanted, now=now))
    check_limits(clamped, capacity)
    return clamped


def load_model(settings: config.EngineConfig, progress: Callable[[str], None]) -> Core:
    """The real thing: resolve and load the model, measure what fits, reserve it."""
    progress("starting")
    # Imported here: torch takes seconds, and /readyz should say what they are spent on.
    from headway_engine import devices, embedding_config, file_digest, loading, model
    from headway_engine.scheduler import Scheduler

    logs.adopt("torch", "transformers")
    progress(f"resolving {settings.model}")
    source = model.resolve(settings.model, settings.revision, model.default_cache_dir(), progress)
    found = loading.load(settings, source, progress)
    loaded, capacity, serving = found.model, found.capacity, found.serving
    built = serving.runner
    limits = starting_limits(settings, capacity)
    embeddings = embedding_config.embeddings_of(source.path, settings.pooling, built.embedding_size)
    ready = Ready(
        capacity=capacity,
        limits=limits,
        model=loaded.description,
        device=str(loaded.device),
        dtype=devices.dtype_name(loaded.dtype),
        runner=built.name,
        kernels=serving.path.kernels,
        fallbacks=serving.fallbacks,
        tokenizer_dir=str(loaded.tokenizer_dir),
        stop_token_ids=loaded.eos_token_ids,
        grammars=built.follows_grammars,
        sampling_defaults=dict(loaded.sampling_defaults),
        vocab_size=int(getattr(loaded.config.get_text_config(), "vocab_size", 0)),
        embeddings=embeddings,
    )
    scheduler = Scheduler(
        capacity, limits, prefix_caching=settings.prefix_caching, tenants=tenant_policy(settings)
    )
    disproof = None
    if source.content is not None and source.content.record is not None:
        # A large file was not read again, since its inode, size and times were known; it is now.
        disproof = functools.partial(file_digest.disproof, source.content)
    return Core(scheduler, built.run, ready, built.prepare, disproof)


def tenant_policy(settings: config.EngineConfig) -> TenantPolicy:
    """The rules of sharing that the file holds, or everyone alike. Raises msgspec.DecodeError."""
    if settings.tenants_file is None:
        return TenantPolicy()
    return msgspec.json.decode(settings.tenants_file.read_bytes(), type=TenantPolicy)


def main(
    argv: list[str], load: Callable[[config.EngineConfig, Callable[[str], None]], Core] = load_model
) -> int:
    """Entry point: FD, then the engine's own arguments."""
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    settings = config.parse(argv[1:])
    logs.configure(settings.log_level, settings.log_format)
    return serve(socket.socket(fileno=int(argv[0])), lambda progress: load(settings, progress))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Taking torch apart takes seconds, and the operating system does it better.
    os._exit(status)
