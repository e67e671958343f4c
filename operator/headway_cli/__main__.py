"""`headway`, and `kubectl headway`: reads the command line and calls one command.

Commands are imported when they are called, so that `headway --help` answers at once.
"""

import argparse
import importlib
import os
import sys
from importlib.metadata import version

from headway_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, Failed, UserError

COMMANDS = {
    "demo": "see a real model answer, and the tuner at work, on this machine",
    "up": "serve a resource on this machine, without a cluster",
    "simulate": "say what a resource would do under a traffic, on a virtual clock, before any of it runs",
    "replay": "play a request trace against an OpenAI endpoint and measure",
    "status": "say in words how a deployment in the cluster does, why, and what would change it",
    "explain": "say of each limit what it is for, why it stands where it does, and what edits would do",
}


def parser() -> argparse.ArgumentParser:
    """The top of the command line; commands add their options when they are chosen."""
    p = argparse.ArgumentParser(
        prog="headway",
        description="Batched LLM inference that keeps its latency promise: declare an SLO, and the engine's "
        "limits follow it, live.",
        epilog="`headway COMMAND --help` explains a command. Start with: headway demo",
    )
    p.add_argument("--version", action="version", version=f"headway {version('headway')}")
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    commands.add_parser("version", help="print the version")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 the user must change something."""
    arguments = sys.argv[1:] if argv is None else argv
    chosen, rest = parser().parse_known_args(arguments)
    if chosen.command == "version":
        print(f"headway {version('headway')}")
        return 0
    command = importlib.import_module(f"headway_cli.{chosen.command}")
    own = argparse.ArgumentParser(prog=f"headway {chosen.command}", description=COMMANDS[chosen.command])
    command.add_arguments(own)
    try:
        status = int(command.run(own.parse_args(rest)))
        sys.stdout.flush()
        return status
    except UserError as e:
        print(f"headway {chosen.command}: {e.message}", file=sys.stderr)
        if e.hint:
            print(e.hint, file=sys.stderr)
        return EXIT_USAGE
    except Failed as e:
        print(f"headway {chosen.command}: {e}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough (`| head`). Nothing is left to flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
