"""Whether CUDA kernels are built, and why: the build backend asks (is nvcc needed?), and so does CMake.

    python packaging/cuda_choice.py AUTO ""    ->    OFF;no NVIDIA GPU or driver was found

PYKV_CUDA = AUTO    ON if PYKV_CUDA_ARCHS is set or the machine has an NVIDIA GPU or driver, else OFF
          = ON      CUDA kernels, with nvcc from PyPI, or the machine's where the environment holds none from PyPI
          = SYSTEM  CUDA kernels, with the machine's nvcc
          = OFF     the CPU alone
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

WORDS = {"1": "ON", "TRUE": "ON", "YES": "ON", "0": "OFF", "FALSE": "OFF", "NO": "OFF", "": "AUTO"}
# What the driver leaves in the file system; /dev/dxg is the GPU of Windows below WSL, whoever made it.
DRIVER = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1")
NVIDIA, DISPLAY = "0x10de", "0x03"


def gpu_or_driver(root: Path) -> str | None:
    """What tells of an NVIDIA GPU or its driver, or None."""
    for name in DRIVER:
        if (root / name).exists():
            return f"/{name} exists"
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return f"an NVIDIA GPU is at {device.name}"
    smi = shutil.which("nvidia-smi")
    return f"{smi} exists" if smi else None


def choose(mode: str, architectures: str, root: Path = Path("/")) -> tuple[str, str]:
    """ON, SYSTEM or OFF, and the reason, for the values of PYKV_CUDA and PYKV_CUDA_ARCHS."""
    mode = WORDS.get(mode.strip().upper(), mode.strip().upper())
    if mode not in ("AUTO", "ON", "SYSTEM", "OFF"):
        raise ValueError(f"PYKV_CUDA: must be AUTO, ON, SYSTEM or OFF, got {mode!r}")
    if mode != "AUTO":
        return mode, f"PYKV_CUDA={mode}"
    if architectures.strip():
        return "ON", "PYKV_CUDA_ARCHS is set"
    found = gpu_or_driver(root)
    return ("ON", found) if found else ("OFF", "no NVIDIA GPU or driver was found")


if __name__ == "__main__":
    try:
        print(*choose(*sys.argv[1:]), sep=";", end="")
    except ValueError as error:
        sys.exit(str(error))
