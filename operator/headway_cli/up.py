"""`headway up`: serve a resource on this machine, show what happens, stop well.

The first Ctrl-C finishes the streams, a second one ends at once.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.live import Live

from headway_cli import arguments, openloop, replay, report, table
from headway_cli.client import Endpoint
from headway_cli.console import make_console, step
from headway_cli.documents import read_resources
from headway_cli.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from headway_cli.figures import Figures, Meter
from headway_cli.machine import OneMachine
from headway_cli.report import Record
from headway_cli.table import View
from headway_cli.traces import Arrival
from headway_engine.logs import LineFormatter
from headway_local.local_cluster import Event

DEFAULT_PORT = 8000
REFRESH_S = 1.0
PLAIN_EVERY_S = 10.0
FILE_EVERY_S = 0.5
SHOWN_DECISIONS = 6

_NEXT_CHANGE = re.compile(r"; (?=\w+ \d+ → )")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway up`."""
    parser.add_argument("-f", "--file", type=Path, required=True, help="the resource, as for kubectl apply")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=arguments.port,
        default=DEFAULT_PORT,
        help=f"port of the endpoint (default {DEFAULT_PORT}, 0: any)",
    )
    parser.add_argument(
        "--json", type=arguments.file_to_write, metavar="FILE", help="with --trace: write the report there"
    )
    replay.add_trace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The command."""
    return asyncio.run(_run(args, make_console()))


async def _run(args: argparse.Namespace, console: Console) -> int:
    resource, others = read_resources(args.file)
    arrivals = replay.chosen_arrivals(args) if args.trace else []
    async with Session(console, resource, others, host=args.host, port=args.port) as session:
        if not await session.until_ready():
            return session.exit_status
        session.introduce()
        async with session.showing(), following(session, args.file):
            if arrivals:
                await session.play(arrivals, Random(args.seed), args.json)
            await session.stop.wait()
    return session.exit_status


@contextlib.asynccontextmanager
async def following(session: "Session", file: Path) -> AsyncIterator[None]:
    """While the body runs, an edit of the file is an edit of the resource."""

    async def follow() -> None:
        name = session.machine.key[1]
        known = await asyncio.to_thread(_fingerprint, file)
        while True:
            await asyncio.sleep(FILE_EVERY_S)
            now = await asyncio.to_thread(_fingerprint, file)
            if now in (known, None):
                continue
            known = now
            try:
                resource, others = await asyncio.to_thread(read_resources, file)
            except UserError as e:
                session.note(f"the edit of {file.name} was not applied: {e.message}")
                continue
            if resource["metadata"]["name"] != name:
                session.note(f"the edit of {file.name} was not applied: the name must stay {name}")
                continue
            session.note(
                f"{file.name} was edited and applied (generation {session.machine.replace(resource, others)})"
            )

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _fingerprint(file: Path) -> tuple[int, int] | None:
    """Changes when the file does; None while it is not there (an editor may be replacing it)."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Session:
    """A machine with a console: what `up` and `demo` share. An async context that drains on the way out."""

    def __init__(
        self,
        console: Console,
        resource: dict[str, Any],
        others: Sequence[dict[str, Any]] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.console = console
        self.stop = asyncio.Event()
        self.traffic = ""
        self.figures = Figures()
        self.events: list[Event] = []
        self._kill = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))
        self._started_s = time.monotonic()
        self._showing = False
        self._leaving = False
        self._body: asyncio.Task[Any] | None = None
        self.machine = OneMachine(
            resource, others, folder=self._folder, host=host, port=port, on_event=self._heard
        )

    async def __aenter__(self) -> "Session":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        self._body = asyncio.current_task()
        log_to(self._folder / "controller.log")
        step(self.console, f"Starting {self.machine.key[1]}; logs are in {self._folder}")
        try:
            await self.machine.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self._leaving = True
        killed = self._kill.is_set()
        failed = kind is not None and not killed
        if not failed and not killed:
            step(self.console, "Stopping: newcomers get 503, streams finish (Ctrl-C again: at once)")
        closing = asyncio.create_task(self.machine.close(kill=failed or killed))
        killing = asyncio.create_task(self._kill.wait())
        await asyncio.wait({closing, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not closing.done():
            await self.machine.cluster.close(0)
        await closing
        if not failed:
            shutil.rmtree(self._folder, ignore_errors=True)
        if killed and self._body is not None:
            self._body.uncancel()
        return killed

    @property
    def exit_status(self) -> int:
        """0 after a drain, that of an interrupted program after a second Ctrl-C."""
        return EXIT_INTERRUPTED if self._kill.is_set() else EXIT_OK

    # Starting.

    async def until_ready(self) -> bool:
        """Tell what goes on until requests are served; False when the user stopped it before."""
        told = [""]

        def tell(state: str) -> None:
            if state != told[0]:
                told[0] = state
                self.console.print(f"    {table.clock(self._elapsed_s())}  {state}", markup=False)

        ready = asyncio.create_task(self.machine.wait_ready(tell))
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
            return False
        ready.result()
        return True

    @property
    def endpoint(self) -> Endpoint:
        """Where to send requests, and as which model."""
        return Endpoint(self.machine.url, self.machine.resource.model.name)

    def introduce(self) -> None:
        """The endpoint, with something to paste."""
        url, model = self.machine.url, self.machine.resource.model.name
        keyed = self.machine.resource.tenancy.keys_secret is not None
        key = "A-KEY-OF-A-TENANT" if keyed else "none"
        header = f" -H 'Authorization: Bearer {key}'" if keyed else ""
        body = json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        )
        step(self.console, f"Ready after {self._elapsed_s():.1f} s: {url}/v1 serves {model}")
        self.console.print(
            f"\n    curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\\n"
            f"        -d '{body}'\n\n"
            f"    from openai import OpenAI\n"
            f'    client = OpenAI(base_url="{url}/v1", api_key="{key}")\n'
            f'    print(client.chat.completions.create(model="{model}",\n'
            f'        messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)\n',
            markup=False,
        )

    # Showing.

    @contextlib.asynccontextmanager
    async def showing(self) -> AsyncIterator[None]:
        """The live table (or plain lines) while the body runs."""
        self._showing = True
        show = self._show_live if self.console.is_terminal else self._show_plain
        task = asyncio.create_task(show())
        try:
            yield
        finally:
            self._showing = False
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _show_live(self) -> None:
        with Live(console=self.console, auto_refresh=False, transient=False) as live:
            async for view in self._views():
                live.update(table.live(view), refresh=True)

    async def _show_plain(self) -> None:
        last_s, limits = -PLAIN_EVERY_S, None
        async for view in self._views():
            changed = view.figures.limits is not None and view.figures.limits != limits
            if changed or view.elapsed_s - last_s >= PLAIN_EVERY_S:
                self.console.print(table.plain(view), markup=False)
                last_s, limits = view.elapsed_s, view.figures.limits or limits

    async def _views(self) -> AsyncIterator[View]:
        meter = Meter()
        while True:
            self.figures = meter.add(time.monotonic(), await self.machine.scrape())
            yield await self._view()
            await asyncio.sleep(REFRESH_S)

    async def _view(self) -> View:
        tuning: Mapping[str, Any] = self.machine.status.get("tuning") or {}
        return View(
            name=self.machine.key[1],
            endpoint=f"{self.machine.url}/v1",
            state=await self.machine.state(),
            elapsed_s=self._elapsed_s(),
            figures=self.figures,
            slo=self.machine.resource.slo,
            verdict=self.machine.verdict,
            reason=str(tuning.get("message", "")),
            decisions=tuple(short_line(e) for e in self.events[-SHOWN_DECISIONS:]),
            traffic=self.traffic,
        )

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        if self._showing and not self.console.is_terminal:
            self.console.print(event_line(event), markup=False)

    def note(self, text: str) -> None:
        """Something that we did ourselves, beside the controller's events."""
        self._heard(Event(datetime.now(UTC), "Normal", "Note", text))

    # Traffic.

    async def play(
        self,
        arrivals: Sequence[Arrival],
        chance: Random,
        json_file: Path | None = None,
        *,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> list[Record]:
        """Send a trace to our own endpoint and print the report; ends early when the user stops."""
        slo = self.machine.resource.slo
        planned = await asyncio.to_thread(openloop.plan, arrivals, chance)
        done: list[Record] = []

        def took(record: Record) -> None:
            done.append(record)
            so_far = report.summarise(done, slo, 1.0)
            self.traffic = (
                f"{len(done)} of {len(planned)} answered, {so_far.attainment:.0%} inside the targets, "
                f"{so_far.rejected} rejected, {so_far.failed} failed"
            )
            on_record(record)

        self.traffic = f"{len(planned)} requests over {arrivals[-1].at_s:.0f} s"
        records = await openloop.replay(planned, self.endpoint, on_record=took, stop=self.stop)
        if records:
            duration_s = max(r.due_s + r.send_lag_s + r.answer.e2e_s for r in records)
            result = report.summarise(records, slo, duration_s)
            self.console.print(table.summary(result, slo))
            if json_file:
                text = json.dumps(report.as_json(result, records), indent=1) + "\n"
                await asyncio.to_thread(json_file.write_text, text)
        return records

    # Inside.

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _interrupted(self) -> None:
        """The first time: come to an end. The second time: now."""
        if not self.stop.is_set():
            self.stop.set()
            return
        self._kill.set()
        if not self._leaving and self._body is not None:
            self._body.cancel()


def log_to(file: Path) -> None:
    """What the controller logs goes to a file: it would tear the live table."""
    handler = logging.FileHandler(file)
    handler.setFormatter(LineFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("headway_operator").setLevel(logging.INFO)


def event_line(event: Event) -> str:
    """An event as one line."""
    advice = "would set " if event.reason == "LimitsRecommended" else ""
    return f"{event.at.astimezone():%H:%M:%S}  {advice}{event.note}"


def changes(event: Event) -> list[str]:
    """The event's changes, one per limit that moved."""
    return _NEXT_CHANGE.split(event_line(event))


def short_line(event: Event) -> str:
    """An event for a table: what moved, and the first words of why."""
    return "; ".join(re.split(r"\. | \(", change)[0] for change in changes(event))
