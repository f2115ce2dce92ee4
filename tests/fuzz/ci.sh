#!/usr/bin/env bash
# The sanitizer step of CI: tests/fuzz/ci.sh PYTHON [SECONDS [SEED]].  PYTHON has what the tests need (numpy, ml_dtypes,
# pytest, pybind11), and pykv itself, as users have it: random calls go to that with each instruction set, too.  SECONDS is
# how long they go on under the sanitizers, in two processes.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD python=$(command -v "$1") seconds=${2:-60} seed=${3:-$(($(date -u +%Y%m%d) * 10000000))}
[[ $python == /* ]] || python=$root/$python
export PYKV_WERROR=${PYKV_WERROR:-ON} PYKV_CUDA=OFF PYTHONDONTWRITEBYTECODE=1
isa=base isas=base
if [[ $(uname -m) == x86_64 ]] && grep -qw avx2 /proc/cpuinfo; then isa=avx2 isas="base avx2"; fi
if [[ $isa == avx2 ]] && grep -qw avx512vl /proc/cpuinfo; then isas+=" avx512"; fi
if [[ $isa == avx2 ]] && grep -qw avx512_bf16 /proc/cpuinfo; then isas+=" avx512bf16"; fi
work=$root/build/fuzz
rm -rf "$work"/{thread,address}
mkdir -p "$work"
pybind11=$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')

build() { # into $work/$1, with sanitizers $2 and further options
  cmake -S . -B "$work/$1" -G Ninja -DPYKV_WERROR="$PYKV_WERROR" -DPYKV_CUDA=OFF -DPYKV_ONE_ISA=$isa -DPYKV_TVM_FFI=OFF \
    -DPYKV_SANITIZE="$2" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_INSTALL_PREFIX="$work/$1-site/pykv" \
    -DPython_EXECUTABLE="$python" "${@:3}" >"$work/$1.log" || { cat "$work/$1.log"; return 1; }
  rm -rf "$work/$1-site" && mkdir -p "$work/$1-site"
  { time cmake --build "$work/$1"; } >"$work/$1.log" 2>&1 || { tail -40 "$work/$1.log"; return 1; }
  tail -3 "$work/$1.log" | tr '\n' ' ' && echo " ($2)"
  cmake --install "$work/$1" >/dev/null
}
# In two processes, with seeds of their own: both_halves SECONDS OFFSET COMMAND...
both_halves() {
  "${@:3}" "$root/tests/fuzz/run.py" --seconds "$1" --seed $((seed + $2)) &
  local other=$! failed=0
  "${@:3}" "$root/tests/fuzz/run.py" --seconds "$1" --seed $((seed + $2 + 1000000)) --no-corpus || failed=1
  wait $other && return $failed
}

build thread thread
g++ -std=c++20 -O1 -g1 -fsanitize=thread -Wall -Werror -I "$work/thread-site/pykv/include" tests/fuzz/tsan_driver.cc \
  -L "$work/thread-site/pykv/lib" -l:libkernels.so.0 -Wl,-rpath,"$work/thread-site/pykv/lib" -pthread -o "$work/tsan_driver"
TSAN_OPTIONS=halt_on_error=1 timeout 120 "$work/tsan_driver"

build address address,undefined -DPYKV_PYTHON=ON -DPYKV_COVERAGE=ON -Dpybind11_DIR="$pybind11"
cp -r pykv/. "$work/address-site/pykv/"
# Python is no such program: the sanitizers are loaded first, and the C++ library whose exceptions they look at
preload=$(for name in libasan.so libubsan.so libstdc++.so.6; do g++ -print-file-name="$name"; done | paste -sd' ')
# a `pykv` of an editable install would be found first: no .pth files, but the packages beside them
packages=$("$python" -c 'import numpy, os; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
sanitized() { # outside of the clone: its folder pykv has no compiled part
  (cd "$work" && PYTHONPATH=$work/address-site:$packages LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 \
    timeout $((seconds + 120)) "$python" -S "$@")
}
imported=$(sanitized -c 'import pykv; print(pykv.__file__)')
[[ $imported == "$work/address-site"/* ]] || { echo "another pykv was imported: $imported" >&2; exit 1; }
# each transfer and some allocations of the cache manager fail in turn
sanitized -m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" \
  "$root/tests/paged_kv_cache/test_interruptions.py" -k "transfer or memory_that_fails"
both_halves "$seconds" 0 sanitized
"$python" tests/fuzz/coverage.py "$work/address"

# as users have it, with each instruction set and overlapping arrays
released() { (cd "$work" && PYKV_ISA=$1 "$python" "${@:2}"); }
offset=2000000
for isa in $isas; do
  echo "PYKV_ISA=$isa"
  both_halves $((seconds / 6)) $offset released "$isa"
  offset=$((offset + 2000000))
done
