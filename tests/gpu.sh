#!/usr/bin/env bash
# Everything that a GPU has to show for a commit, in one record: the tests, and every operation under the tools of
# compute-sanitizer.  Wants pykv installed with CUDA kernels, pytest, CuPy and compute-sanitizer.
#
#   tests/gpu.sh benchmarks/results/gpu.json          (COMMIT=... where this is no git checkout)
#
# Exits with 0 if all of it passed.  Folders of tests, and files of attention's, run in processes of their own, on the
# GPUs in turn, for the workers of pytest-xdist do not come up beside CUDA.  Logs lie in build/gpu/.
set -uo pipefail
cd "$(dirname "$0")/.."
record=${1:?where does the record go?}
logs=build/gpu && rm -rf $logs && mkdir -p $logs
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
export PYTHONSAFEPATH=1 # `import pykv` finds what is installed, not the source folder

names=() pids=()
begin() { # NAME COMMAND...: in the background, on the next GPU
  local name=$1 gpu=$((${#names[@]} % gpus))
  shift
  (
    SECONDS=0
    CUDA_VISIBLE_DEVICES=$gpu timeout "${LIMIT:-1500}" "$@" >"$logs/$name.log" 2>&1
    echo "$? $SECONDS" >"$logs/$name.rc"
  ) &
  names+=("$name") pids+=($!)
}

for part in tests/attention/test_*.py tests/{cache,norm,rotary,activation,dequantization,embedding,moe,quantization,sampling,paged_kv_cache,interop,examples}; do
  begin "pytest-$(basename "$part" .py)" python3 -m pytest -q -p no:cacheprovider --device cuda "$part"
done
wait "${pids[@]}"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    begin "$tool" compute-sanitizer --tool $tool --error-exitcode 9 python3 -m pykv check --device cuda
  done
  wait "${pids[@]: -4}"
fi

python3 - "$record" "$logs" "${names[@]}" <<'EOF'
import json, os, re, subprocess, sys, time
from pathlib import Path

record, logs, *names = sys.argv[1:]


def said(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


steps = {}
for name in names:
    rc, seconds = map(int, Path(logs, name + ".rc").read_text().split())
    text = Path(logs, name + ".log").read_text(errors="replace")
    closing = re.findall(r"^.*(?:passed|failed|ERROR SUMMARY|no tests ran).*$", text, flags=re.MULTILINE)
    steps[name] = {"exit": 0 if rc == 5 else rc, "seconds": seconds, "says": closing[-1].strip() if closing else ""}
card = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
found = {
    "commit": os.environ.get("COMMIT") or said("git", "rev-parse", "HEAD"),
    "card": card.splitlines()[0] if card else None,
    "date": time.strftime("%Y-%m-%d"),
    "steps": steps,
}
Path(record).write_text(json.dumps(found, indent=1) + "\n")
for name, step in steps.items():
    print(f"{step['exit']:3} {step['seconds']:5} s  {name}: {step['says']}")
sys.exit(any(step["exit"] for step in steps.values()))
EOF
