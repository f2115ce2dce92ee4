"""What is asked for on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pykv
from pykv._tools import bench, check, info
from pykv._tools.errors import CommandError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pykv", description="What pykv is here, and whether it works.")
    top.add_argument("--version", action="version", version=f"pykv {pykv.__version__}")
    commands = top.add_subparsers(dest="command")
    telling = commands.add_parser("info", help="versions, build, devices, frameworks and how their arrays come in")
    form = telling.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with the environment variables PYKV_*")
    form.add_argument("--report", action="store_true", help="a form to paste into an issue")
    checking = commands.add_parser("check", help="runs every operation and compares with recorded results")
    checking.add_argument("op", nargs="*", help="operations, by default all")
    checking.add_argument("--device", action="append", default=[], help='"cpu" or "cuda:<n>", by default all')
    checking.add_argument("-q", "--quiet", action="store_true", help="show failures and the count alone")
    checking.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    timing = commands.add_parser("bench", help="times operations beside a plain copy of as many bytes")
    timing.add_argument("op", nargs="*", help="operations, by default all")
    timing.add_argument("--device", help='"cpu" or "cuda:<n>", by default the first GPU, else the CPU')
    timing.add_argument("--tokens", type=_count, action="append", help="sizes of a call, by default 16, 512 and 8192")
    timing.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    timing.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file; -: to stdout")
    timing.add_argument("--plot", type=Path, metavar="FILE", help="draw them under the roof of the copy (matplotlib)")
    config = commands.add_parser("config", help="where the C library is, for compilers and build systems")
    for flag, (meaning, _) in info.FOLDERS.items():
        config.add_argument(f"--{flag}", dest="flags", action="append_const", const=flag, help=meaning)
    return top


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status: 1 where a check failed, 2 where what was asked for cannot be done.

    130 where Ctrl-C ended it.
    """
    asked = parser().parse_args(arguments)
    if asked.command is None:
        parser().print_help()
        return 0
    try:
        if asked.command == "info":
            return info.run("json" if asked.json else "report" if asked.report else "")
        if asked.command == "config":
            return info.config(asked.flags or [])
        if asked.command == "check":
            return check.run(asked.op, asked.device, asked.quiet, asked.json)
        return bench.run(asked.op, asked.device, asked.tokens or [16, 512, 8192], asked.dtype, asked.json, asked.plot)
    except CommandError as error:
        print(f"pykv {asked.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
