#!/usr/bin/env bash
# The sanitizer step of CI: tests/fuzz/ci.sh PYTHON [SECONDS [SEED]].  PYTHON has what the tests need (numpy, ml_dtypes,
# pytest); SECONDS is how long random calls go on.  Line coverage is not measured: gcov slows the kernels down too much.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD python=$(command -v "$1") seconds=${2:-120} seed=${3:-}
export PYKV_WERROR=${PYKV_WERROR:-ON} PYKV_CUDA=OFF PYKV_ONE_ISA=base
if [[ $(uname -m) == x86_64 ]] && grep -qw avx2 /proc/cpuinfo; then PYKV_ONE_ISA=avx2; fi
work=$root/build/fuzz
[[ $python == /* ]] || python=$root/$python
mkdir -p "$work"
pybind11=$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')

build() { # into $work/$1, with sanitizers $2 and further options
  cmake -S . -B "$work/$1" -G Ninja -DPYKV_WERROR="$PYKV_WERROR" -DPYKV_CUDA=OFF -DPYKV_ONE_ISA="$PYKV_ONE_ISA" \
    -DPYKV_SANITIZE="$2" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_INSTALL_PREFIX="$work/$1-site/pykv" \
    -DPython_EXECUTABLE="$python" "${@:3}" >"$work/$1.log" || { cat "$work/$1.log"; return 1; }
  rm -rf "$work/$1-site" && mkdir -p "$work/$1-site"
  { time cmake --build "$work/$1"; } >"$work/$1.log" 2>&1 || { tail -40 "$work/$1.log"; return 1; }
  tail -3 "$work/$1.log" | tr '\n' ' ' && echo " ($2)"
  cmake --install "$work/$1" >/dev/null
}

build thread thread
g++ -std=c++20 -O1 -g1 -fsanitize=thread -Wall -Werror -I "$work/thread-site/pykv/include" tests/fuzz/tsan_driver.cc \
  -L "$work/thread-site/pykv/lib" -l:libkernels.so.0 -Wl,-rpath,"$work/thread-site/pykv/lib" -pthread -o "$work/tsan_driver"
TSAN_OPTIONS=halt_on_error=1 timeout 120 "$work/tsan_driver"

build address address,undefined -DPYKV_PYTHON=ON -Dpybind11_DIR="$pybind11"
cp -r pykv/. "$work/address-site/pykv/"
# Python is no such program: the sanitizers are loaded first, and the C++ library whose exceptions they look at
preload=$(for name in libasan.so libubsan.so libstdc++.so.6; do g++ -print-file-name="$name"; done | paste -sd' ')
export PYTHONPATH=$work/address-site PYTHONDONTWRITEBYTECODE=1
run() { # with a limit of $1 seconds, outside of the clone: its folder pykv has no compiled part
  (cd "$work" && LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 timeout "$1" "$python" "${@:2}")
}
imported=$(run 60 -c 'import pykv; print(pykv.__file__)')
[[ $imported == "$PYTHONPATH"/* ]] || { echo "another pykv was imported: $imported" >&2; exit 1; }
# each transfer and some allocations of the cache manager fails in turn
run 120 -m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" \
  "$root/tests/paged_kv_cache/test_interruptions.py" -k "transfer or memory_that_fails"
run $((seconds + 90)) "$root/tests/fuzz/run.py" --seconds "$seconds" ${seed:+--seed "$seed"}
