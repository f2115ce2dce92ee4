"""Lines that ran of what stands before the kernels: ``python tests/fuzz/coverage.py BUILD``.

BUILD is the folder of a library that was built with PYKV_COVERAGE=ON, and called.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def lines(build: Path) -> dict[str, dict[int, bool]]:
    """File below src/kernels -> number of a line -> whether it ran in any of the files that it was compiled in."""
    counts = sorted(build.glob("CMakeFiles/kernels.dir/**/*.gcda"))
    if not counts:
        sys.exit(f"nothing was counted in {build}")
    command = ["gcov", "--json-format", "--stdout", *map(str, counts)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=build).stdout
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    for report in told.splitlines():
        for file in json.loads(report)["files"]:
            _, here, name = file["file"].partition("src/kernels/")
            if not here:
                continue
            for line in file["lines"]:
                number = line["line_number"]
                found[name][number] = found[name].get(number, False) or line["count"] > 0
    return found


def main() -> None:
    families: dict[str, list[bool]] = defaultdict(list)
    for name, ran in lines(Path(sys.argv[1])).items():
        families[name.split("/")[0]] += ran.values()
    families["all"] = [line for ran in families.values() for line in ran]
    print("lines that ran before the kernels, of each folder:")
    for family, ran in sorted(families.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{100 * sum(ran) / len(ran):5.0f} %  of {len(ran):5}  {family}")


if __name__ == "__main__":
    main()
