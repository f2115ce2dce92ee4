#!/usr/bin/env bash
# Everything that a GPU has to show for a commit, in one record; see gpu.py.
cd "$(dirname "$0")/.." && exec python3 tests/gpu.py "$@"
