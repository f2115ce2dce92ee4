"""What is asked for on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pykv._cli import info


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m pykv", description="What pykv is here, and whether it works.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build, devices, frameworks and how their arrays come in")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    parser().parse_args(arguments)
    return info.run()
