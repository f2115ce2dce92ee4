"""What the CUDA kernels of each family cost, held against packaging/budget.toml.

    python packaging/budget.py build/cp311-cp311-linux_x86_64 --log build/pip.log

Prints for each family the kernel instances and the bytes of machine code in its objects (`cuobjdump`, of PyPI's
nvidia-cuda-cuobjdump or a CUDA toolkit), the seconds that compiling took (`.ninja_log`), and the spills that ptxas told
the log of.  With more jobs than processors the seconds are more than those of a processor; with ccache they are less.
Exits with 1 where a family has more instances or bytes than the budget allows.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import tomllib

BUDGET = Path(__file__).with_name("budget.toml")


def find_cuobjdump() -> str:
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = [*map(str, sorted(wheels.glob("cu[0-9]*/bin/cuobjdump"), reverse=True)), shutil.which("cuobjdump")]
    if not found[0]:
        sys.exit("cuobjdump was not found: pip install nvidia-cuda-cuobjdump")
    return found[0]


def kernels(cuobjdump: str, object_file: Path) -> dict[str, int]:
    """Bytes of machine code of each kernel, by its mangled name, summed over architectures."""
    sizes: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", object_file.resolve()], cwd=folder, stdout=subprocess.DEVNULL)
        for cubin in Path(folder).iterdir():
            sections = subprocess.run(["readelf", "-SW", cubin], capture_output=True, text=True, check=True).stdout
            for name, size in re.findall(r"\] \.text\.(\S+)\s+PROGBITS\s+\w+ \w+ (\w+)", sections):
                sizes[name] += int(size, 16)
    return sizes


def spills(log: str) -> dict[str, int]:
    """Bytes that each kernel stores because registers ran out, where they are not 0."""
    told = re.findall(r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores", log, flags=re.DOTALL)
    return {name: int(size) for name, size in told if size != "0"}


def seconds(ninja_log: str) -> dict[str, float]:
    """Of compiling, by kind: `norm` for the CUDA code of a family, `CPU twins`, `C entries`, `bindings`."""
    spent: dict[str, float] = defaultdict(float)
    last = {line.split("\t")[3]: line.split("\t") for line in ninja_log.splitlines() if line.count("\t") == 4}
    for output, (start, end, *_) in last.items():
        family = re.search(r"kernels\.dir/src/kernels/(\w+)/[\w/]+\.cu\.o$", output)
        kind = family[1] if family else None
        for name, pattern in (("CPU twins", "/cpu_"), ("C entries", "/kernels.dir/"), ("bindings", "/_C.dir/")):
            if kind is None and pattern in output and output.endswith(".o"):
                kind = name
        if kind:
            spent[kind] += (int(end) - int(start)) / 1000
    return spent


def measure(build: Path, log: str) -> dict[str, dict[str, Any]]:
    cuobjdump, spilled, spent = find_cuobjdump(), spills(log), seconds((build / ".ninja_log").read_text())
    families: dict[str, dict[str, Any]] = {}
    for folder in sorted((build / "CMakeFiles" / "kernels.dir" / "src" / "kernels").iterdir()):
        objects = sorted(folder.rglob("*.cu.o"))
        if not objects:
            continue
        found: dict[str, int] = {}
        instances = 0
        for path in objects:
            of_file = kernels(cuobjdump, path)
            instances += len(of_file)
            found |= of_file
            families.setdefault(folder.name, {"bytes": 0})["bytes"] += sum(of_file.values())
        families[folder.name] |= {
            "instances": instances,
            "seconds": spent.pop(folder.name, 0.0),
            "spills": {name: spilled[name] for name in found if name in spilled},
        }
    for kind, value in spent.items():
        families[kind] = {"bytes": 0, "instances": 0, "seconds": value, "spills": {}}
    return families


def beyond(measured: dict[str, dict[str, Any]], budget: dict[str, dict[str, int]]) -> list[str]:
    """What is not allowed, a sentence each."""
    wrong = []
    for family, found in measured.items():
        for what in ("instances", "bytes"):
            allowed = budget.get(family, {}).get(what, 0)
            if found[what] > allowed:
                wrong.append(f"{family}: {found[what]} {what}, {allowed} are allowed")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a build folder with .ninja_log and CMakeFiles/")
    parser.add_argument("--log", type=Path, help="what the build printed, with PYKV_WERROR=ON")
    asked = parser.parse_args()
    budget = tomllib.loads(BUDGET.read_text())
    measured = measure(asked.build, asked.log.read_text(errors="replace") if asked.log else "")
    print(f"{'':12} {'instances':>9} {'allowed':>8} {'bytes':>11} {'allowed':>11} {'seconds':>8}  spills")
    for family, found in measured.items():
        allowed = budget.get(family, {})
        print(
            f"{family:12} {found['instances']:9} {allowed.get('instances', 0):8} {found['bytes']:11,} "
            f"{allowed.get('bytes', 0):11,} {found['seconds']:8.0f}  {len(found['spills'])}"
        )
    for found in measured.values():
        for name, size in found["spills"].items():
            print(f"  spills {size} bytes: {name}")
    if wrong := beyond(measured, budget):
        sys.exit("\n".join(["More than packaging/budget.toml allows:", *wrong]))


if __name__ == "__main__":
    main()
