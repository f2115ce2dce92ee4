"""Random right and wrong calls of every operation: ``python tests/fuzz/run.py --seconds 240``.

A call must do what it says, or raise a TypeError, ValueError or NotImplementedError that names the operation and an
argument.  Arrays lie between pages that nobody may touch; in some calls another process changes the ids meanwhile, and
some find another floating-point environment, which must be there afterwards.  Where the time was enough, each operation
must have had right calls other than its sample, wrong ones, and, if it takes ids, some that changed.  The
seeds that once failed (``corpus.txt``) come first, then those of today, or from ``--seed`` on.  A call that ends the
process, or takes too long, is told with its seed; ``--seed N --count 1 --no-corpus`` makes it again.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.txt"
LONGEST = 60  # seconds of one call
ALLOWED = (TypeError, ValueError, NotImplementedError)


def corpus() -> list[tuple[int, str | None]]:
    """Lines are a seed, an operation or ``-``, and what was wrong."""
    lines = [line.split("#")[0].split() for line in CORPUS.read_text().splitlines()]
    return [(int(line[0]), None if line[1] == "-" else line[1]) for line in lines if line]


def tell(what: str) -> None:
    """What the process above prints, should this one end."""
    os.pwrite(3, what.encode(errors="replace")[:4000].ljust(4000), 0)


class FloatEnvironment:
    """Rounding, and what becomes of denormal numbers, by x86-64's MXCSR."""

    BITS = (1 << 15 | 1 << 6, 1 << 13, 2 << 13, 3 << 13)  # flush to zero; downward, upward, toward zero
    MXCSR, FLAGS = 28 // 4, 0x3F  # where glibc's fenv_t holds it, in words; what has happened so far

    def __init__(self) -> None:
        self.libm = ctypes.CDLL("libm.so.6") if platform.machine() == "x86_64" else None
        self.usual = self._now() if self.libm else None
        self.wanted = 0

    def _now(self) -> Any:
        now = (ctypes.c_uint32 * 8)()
        self.libm.fegetenv(now)
        return now

    def set(self, rng: Any) -> None:
        if self.libm and rng.random() < 0.1:
            other = self._now()
            other[self.MXCSR] |= self.BITS[rng.integers(len(self.BITS))]
            self.libm.fesetenv(other)
            self.wanted = other[self.MXCSR] & ~self.FLAGS

    def restore(self) -> bool:
        """The usual one again; whether the other was still there."""
        if not self.wanted:
            return True
        found = self._now()[self.MXCSR] & ~self.FLAGS
        self.libm.fesetenv(self.usual)
        kept, self.wanted = found == self.wanted, 0
        return kept


def make_calls(first: int, count: int, seconds: float, op: str | None, replay: bool) -> int:
    """In this process.  The number of calls that went wrong without ending it."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import guarded
    import ids_that_change
    import numpy as np
    from cases import BELIEVED, Case

    import pykv
    from pykv import _schema

    end, wrong = time.monotonic() + seconds, 0
    seen: Counter[tuple[str, str]] = Counter()
    environment = FloatEnvironment()
    changing = ids_that_change.Page()
    seeds = corpus() if replay else ((seed, op) for seed in range(first, first + count))
    for seed, name in seeds:
        if time.monotonic() > end:
            break
        tell(f"{seed} - while it was made")
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = Case(seed, name)
        tell(f"{seed} {case.name} {case.changes}")
        guarded.AT_END = bool(case.rng.integers(2))
        pykv.set_num_threads(int(case.rng.integers(1, 4)))
        call = guarded.guarded(getattr(pykv, case.name))
        change = case.name not in BELIEVED and case.rng.random() < 0.2
        environment.set(case.rng)
        signal.alarm(LONGEST)
        try:
            with np.errstate(all="ignore"):
                if change:
                    with changing.holding(case.arguments) as arguments:
                        seen[case.name, "ids changed"] += arguments is not case.arguments
                        getattr(pykv, case.name)(**arguments)
                else:
                    call(**case.arguments)
            seen[case.name, "done"] += bool(case.changes)
        except ALLOWED as error:
            # an id, which is told by what it is an id of, or a row
            ran = re.search("it was not used|it was used as|^[^:]*: [^:]*: row ", str(error)) is not None
            seen[case.name, "done" if ran else "refused"] += 1
            named = ran or any(re.search(rf"\b{p.name}\b", str(error)) for p in case.op.parameters)
            if case.name not in str(error) or not named:
                wrong += 1
                print(f"seed {seed}: names no argument: {error} <- {case.name} {case.changes}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"seed {seed}: {type(error).__name__}: {error} <- {case.name} {case.changes}", flush=True)
        finally:
            signal.alarm(0)
        if not environment.restore():
            wrong += 1
            print(f"seed {seed}: changed its caller's floating-point environment <- {case.name}", flush=True)
    changing.close()
    total = Counter({how: sum(n for (_, h), n in seen.items() if h == how) for how in ("done", "refused")})
    what = "corpus: " if replay else ""
    print(f"{what}{total['done']} calls done, {total['refused']} refused", flush=True)
    if not replay and op is None and total.total() > 60 * len(_schema.all_ops()):
        for how in ("done", "refused", "ids changed"):
            if never := sorted(
                name for name, of in _schema.all_ops().items() if takes(of, how) and not seen[name, how]
            ):
                wrong += 1
                print(f"of these no call was {how}: {', '.join(never)}")
    return wrong


def takes(op: Any, how: str) -> bool:
    """Whether calls of an operation may be that: not all have ids."""
    from cases import BELIEVED

    from pykv._tools.samples import sample

    if how != "ids changed":
        return True
    values = [sample(op.name).get(p.name) for p in op.parameters]
    ids = [v for v in values if hasattr(v, "dtype") and v.dtype.kind == "i" and v.itemsize >= 4]
    return bool(ids) and op.name not in BELIEVED


def supervise(arguments: argparse.Namespace) -> int:
    """Processes that make calls, one after another: behind a seed that ended one, the next begins."""
    end, failed = time.monotonic() + arguments.seconds, 0
    seed, last = arguments.seed, arguments.seed + arguments.count
    replay = arguments.op is None and not arguments.no_corpus
    os.environ["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":abort_on_error=1:allocator_may_return_null=1"
    os.environ["UBSAN_OPTIONS"] = os.environ.get("UBSAN_OPTIONS", "") + ":abort_on_error=1:print_stacktrace=1"
    while seed < last and time.monotonic() < end:
        with tempfile.TemporaryFile() as note:
            command = [
                sys.executable,
                *(["-S"] if sys.flags.no_site else []),
                __file__,
                "--child",
                "--seed",
                str(seed),
                "--count",
                str(last - seed),
            ]
            command += ["--seconds", str(max(1.0, end - time.monotonic()))]
            command += ["--op", arguments.op] if arguments.op else []
            command += ["--replay"] if replay else []

            def keep(descriptor: int = note.fileno()) -> None:
                os.dup2(descriptor, 3)

            done = subprocess.run(command, pass_fds=(3,), preexec_fn=keep, check=False)
            note.seek(0)
            what = note.read().decode(errors="replace").strip("\0 \n")
        if done.returncode not in (0, 1):
            failed += 1
            print(f"ENDED with {done.returncode}: seed {what}", flush=True)
            if replay:
                replay = False  # the rest of the corpus waits until this is mended
            else:
                seed = int(what.split()[0]) + 1 if what else last
            if failed >= 10:
                break
        else:
            failed += done.returncode
            if not replay:
                break
            replay = False
    print(f"seeds from {arguments.seed} on: {'FAILED' if failed else 'nothing found'}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    today = int(datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")) * 10_000_000
    parser.add_argument("--seed", type=int, default=today, help="the first one (default: of today)")
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--op", help="this one alone")
    parser.add_argument("--no-corpus", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--replay", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # too long: the process ends
        a = arguments
        return 1 if make_calls(a.seed, a.count, a.seconds, a.op, a.replay) else 0
    print(f"seed {arguments.seed}, {arguments.seconds:.0f} s", flush=True)
    return supervise(arguments)


if __name__ == "__main__":
    sys.exit(main())
