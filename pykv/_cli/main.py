"""What is asked for on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pykv._cli import check, info
from pykv._cli.errors import CommandError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m pykv", description="What pykv is here, and whether it works.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build, devices, frameworks and how their arrays come in")
    checking = commands.add_parser("check", help="runs every operation and compares with recorded results")
    checking.add_argument("op", nargs="*", help="operations, by default all")
    checking.add_argument("--device", action="append", default=[], help='"cpu" or "cuda:<n>", by default all')
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status: 1 where a check failed, 2 where what was asked for cannot be done."""
    asked = parser().parse_args(arguments)
    try:
        if asked.command == "info":
            return info.run()
        return check.run(asked.op, asked.device)
    except CommandError as error:
        print(f"python -m pykv {asked.command}: {error}", file=sys.stderr)
        return 2
