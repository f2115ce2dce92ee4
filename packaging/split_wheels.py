"""Splits wheels of pykv, one for each Python, into one of the library that all share and small ones that require it.

    python packaging/split_wheels.py wheelhouse/*.whl --out dist

``pykv/lib`` and ``pykv/include`` of the first wheel become ``pykv_libkernels-<version>-py3-none-<platform>.whl``; what
is left of each wheel requires that very version.  The extension looks for the library in both places.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import zipfile
from email.parser import Parser
from pathlib import Path

SHARED = ("pykv/lib/", "pykv/include/")


class Wheel(zipfile.ZipFile):
    """A wheel that is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name, self.version, self.python, self.abi, self.platform = path.stem.split("-")
        self.info = f"{self.name}-{self.version}.dist-info/"

    def contents(self) -> dict[str, bytes]:
        return {i.filename: self.read(i) for i in self.infolist() if not i.is_dir()}


def write(path: Path, contents: dict[str, bytes], info: str) -> None:
    """A wheel of these files, in an order and with times that depend on nothing else; RECORD is made anew."""
    record = info + "RECORD"
    contents = {name: contents[name] for name in sorted(contents) if name != record}
    lines = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    contents[record] = ("".join(lines) + f"{record},,\n").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # 1980
            entry.external_attr = (0o100755 if ".so" in Path(name).name else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, data)
    print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


def split_kernels(wheel: Wheel, out: Path) -> None:
    """The wheel of the library, from one for any Python."""
    info = f"pykv_libkernels-{wheel.version}.dist-info/"
    old = Parser().parsestr(wheel.read(wheel.info + "METADATA").decode())
    about = [
        f"Metadata-Version: {old['Metadata-Version']}",
        "Name: pykv-libkernels",
        f"Version: {wheel.version}",
        "Summary: libkernels of pykv: the C library, its headers, CMake package and pkg-config file",
        f"License-Expression: {old['License-Expression']}",
        *(f"License-File: {name}" for name in old.get_all("License-File", [])),
    ]
    tag = f"Wheel-Version: 1.0\nGenerator: split_wheels\nRoot-Is-Purelib: false\nTag: py3-none-{wheel.platform}\n"
    contents = {info + "METADATA": "\n".join([*about, ""]).encode(), info + "WHEEL": tag.encode()}
    for name, data in wheel.contents().items():
        if name.startswith(SHARED):
            contents[name.replace("pykv/", "pykv_libkernels/", 1)] = data
        elif name.startswith((wheel.info + "licenses/", wheel.info + "sboms/")):
            contents[name.replace(wheel.info, info)] = data
    write(out / f"pykv_libkernels-{wheel.version}-py3-none-{wheel.platform}.whl", contents, info)


def split_bindings(wheel: Wheel, out: Path) -> None:
    """What is left of a wheel without the library."""
    contents = {name: data for name, data in wheel.contents().items() if not name.startswith(SHARED)}
    headers, end, body = contents[wheel.info + "METADATA"].decode().partition("\n\n")
    requires = f"\nRequires-Dist: pykv-libkernels=={wheel.version}"
    contents[wheel.info + "METADATA"] = (headers + requires + end + body).encode()
    write(out / Path(str(wheel.filename)).name, contents, wheel.info)


def shared(wheel: Wheel) -> dict[str, int]:
    """Checksums of what all wheels must have in common."""
    return {i.filename: i.CRC for i in wheel.infolist() if i.filename.startswith(SHARED) and not i.is_dir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    wheels = [Wheel(path) for path in asked.wheel]
    first = shared(wheels[0])
    if not any(re.search(r"libkernels\.so\.\d+$", name) for name in first):
        parser.error(f"{asked.wheel[0]} holds no libkernels")
    for wheel in wheels:
        if (wheel.version, wheel.platform) != (wheels[0].version, wheels[0].platform):
            parser.error(f"{wheel.filename} is of another version or platform than {wheels[0].filename}")
        differing = sorted(name for name, crc in shared(wheel).items() ^ first.items())
        if differing:
            parser.error(f"{wheel.filename} and {wheels[0].filename} differ in {differing[0]}")
        split_bindings(wheel, asked.out)
    split_kernels(wheels[0], asked.out)


if __name__ == "__main__":
    main()
