"""``pykv`` and ``python -m pykv``, on the CPU where nothing else is said."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import expected
import numpy as np
import pytest

import pykv
from pykv import _C
from pykv._schema import all_ops
from pykv._tools import bench, check, devices, info, output, timing
from pykv._tools.main import main
from pykv._tools.samples import ADDRESSED, MEMORY, SAMPLES, WORKLOADS, sample
from pykv._tools.samples._served import NARROW, parts, served


@pytest.fixture
def no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "pykv"],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: pykv ")
    assert not done.stderr


def test_the_console_script_is_main():
    script = re.search(r'^pykv = "(.+)"$', (Path(__file__).parent.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert script is not None
    assert pkgutil.resolve_name(script[1]) is main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pykv {pykv.__version__}\n"


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.setattr(info, "FRAMEWORKS", info.FRAMEWORKS[:1])
    monkeypatch.setenv("PYKV_COMMIT", "0123abc")
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["machine"]["pykv"], told["machine"]["commit"]) == (pykv.__version__, "0123abc")
    assert told["arrays"][0] == {"library": "NumPy", "version": np.__version__, "way_in": "ndarray struct"}
    assert told["environment"]["PYKV_COMMIT"] == "0123abc"


def test_info_as_a_report(capsys, monkeypatch):
    monkeypatch.setattr(info, "FRAMEWORKS", info.FRAMEWORKS[:1])
    monkeypatch.setattr(info, "driver", lambda: "driver 123")
    monkeypatch.setattr(info, "commit", lambda: None)
    monkeypatch.setenv("PYKV_NUM_THREADS", "1")
    assert main(["info", "--report"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("### What I did")
    wanted = [f"pykv: {pykv.__version__}", f"NumPy: {np.__version__}", "driver: driver 123", "commit: unknown"]
    for line in [*wanted, f"build: {_C.build_note()}", "PYKV_NUM_THREADS: 1"]:
        assert f"\n- {line}" in text


def test_the_compiler_is_read_from_the_library(monkeypatch, tmp_path):
    (tmp_path / "libkernels.so.0").write_bytes(b"\0GCC: (Debian 14.2.0-1) 14.2.0\0GCC: (Debian 14.2.0-1) 14.2.0\0")
    monkeypatch.setattr(pykv, "get_library_dir", lambda: str(tmp_path))
    assert info.compilers() == "GCC: (Debian 14.2.0-1) 14.2.0"
    (tmp_path / "libkernels.so.0").write_bytes(b"\0")
    assert info.compilers() is None


@pytest.mark.parametrize("rich", [True, False])
def test_info(capsys, request, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        request.getfixturevalue("no_rich")
    monkeypatch.setattr(info, "FRAMEWORKS", info.FRAMEWORKS[:1])
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert pykv.__version__ in text
    assert f"kernels for {_C.cpu_isa()}" in text
    assert ("built with CUDA kernels for" if _C.has_cuda() else "built for the CPU alone") in text
    assert np.__version__ in text
    assert "ndarray struct" in text


def test_config_tells_the_folders_that_exist(capsys, no_rich):
    assert main(["config", "--cmakedir", "--includes", "--pkgconfigdir"]) == 0
    cmake, includes, pkgconfig = capsys.readouterr().out.splitlines()
    assert (Path(cmake) / "pykvConfig.cmake").is_file()
    assert (Path(includes.removeprefix("-I")) / "pykv" / "kernels.h").is_file()
    assert (Path(pkgconfig) / "pykv.pc").is_file()
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert f"--libdir        {pykv.get_library_dir()}" in text
    assert text.count("--") > 4


def test_what_is_not_installed_is_not_imported(monkeypatch):
    monkeypatch.setattr(info, "FRAMEWORKS", (("none", ("no-such-distribution",), "no_such_module:Array"),))
    assert next(info.frameworks()) == ("none", "-", "not installed")


def test_a_framework_that_cannot_be_imported_is_told():
    assert info.way_in("no_such_module:Array").startswith("cannot be imported: ModuleNotFoundError")


def test_way_in_is_the_one_that_calls_take():
    class Exported:
        def __dlpack__(self):
            pass

    class Cuda:
        __cuda_array_interface__ = None

    ways = [_C.way_in(kind) for kind in (np.ndarray, _C.Pointer, Exported, Cuda, dict)]
    assert ways == ["ndarray struct", "raw pointer", "__dlpack__", "__cuda_array_interface__", ""]


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["what"])
    assert "invalid choice: 'what'" in capsys.readouterr().err


def test_plain_tables_line_up(capsys, no_rich):
    output.show("title", ("op", "us"), [("a", "1"), ("long", "10")], right=1)
    assert capsys.readouterr().out == "title\nop    us\n----  --\na      1\nlong  10\n"


def test_recorded_results_are_those_of_the_references():
    """Else: python tests/derived.py"""
    kept = check.recorded()
    assert set(expected.EXPECTED) == set(SAMPLES) == set(all_ops())
    assert set(kept) == {call for name in SAMPLES for call in expected.labels(name)}
    for call, results in kept.items():
        now = {k.partition("/")[2]: v for k, v in expected.entries(call).items()}
        assert set(results) == set(now)
        for k, v in now.items():
            assert (results[k].dtype, results[k].shape) == (v.dtype, v.shape)
            if v.dtype.kind in "fiub":
                error = {"rtol": 1e-6, "atol": 1e-7} if v.dtype != np.uint16 else {"atol": 1}  # bits of bfloat16
                np.testing.assert_allclose(results[k].astype(float), v.astype(float), err_msg=f"{call}: {k}", **error)
            else:
                assert results[k].tolist() == v.tolist()  # names


def test_what_engines_call_is_checked():
    kept = check.recorded()
    for name in ("paged_attention", "paged_attention_v1", "reshape_and_cache", "rotary_and_cache"):
        assert {f"{name} (bfloat16)", f"{name} (e4m3 cache)"} <= set(kept)
    both = [name for name in SAMPLES if f"{name} (bfloat16)" in kept]
    assert len(both) > len(SAMPLES) * 2 // 3


@pytest.mark.parametrize("call", sorted(check.recorded()))
def test_an_operation_that_does_nothing_fails(call):
    """Every written array is recorded, and differs from what is there before the call."""
    kept = check.recorded()[call]
    assert check.check(call, devices.CPU, kept).result == "pass"
    narrow = kept.pop(NARROW, np.array([], str)).tolist()
    assert set(check.results(call, devices.CPU, narrow)) == set(kept)
    name, variant = parts(call)
    tolerance = check.ROUNDED if variant else check.TOLERANCE
    before = (served(name, variant, narrow) if variant else sample(name)) | {"memory": MEMORY}
    for key, wanted in kept.items():
        parameter, _, number = key.partition("/")
        array = before[parameter][int(number)] if number else before[parameter]
        unwritten = (name, parameter) == ("swap_blocks_layers", "src_caches")
        assert unwritten or check.compare({key: array}, {key: wanted}, tolerance)[1], key


def test_check_passes_here(capsys):
    pytest.importorskip("rich")
    assert main(["check", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"{len(check.recorded())} passed, 0 failed, 0 skipped" in text
    assert "rms_norm_gated" in text


def test_check_finds_what_is_wrong(capsys, monkeypatch, no_rich):
    kept = check.recorded()
    kept["rms_norm"]["out"][1, 2] *= 1.001
    kept["silu_and_mul_quant"]["result"][0, 3] ^= 1
    del kept["relu2"]["out"]
    kept["relu2"]["nothing"] = np.zeros(1)
    monkeypatch.setattr(check, "recorded", lambda: kept)
    assert main(["check", "rms_norm", "silu_and_mul_quant", "relu2", "layer_norm", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "out[1, 2]: " in text
    assert "1 of 24 are wrong" in text
    assert "result[0, 3]: " in text
    assert "KeyError: 'nothing'" in text
    assert "5 passed, 3 failed" in text


def test_check_says_little_or_tells_machines(capsys, monkeypatch, no_rich):
    kept = check.recorded()
    kept["rms_norm"]["out"][1, 2] *= 1.001
    monkeypatch.setattr(check, "recorded", lambda: kept)
    call = ["check", "rms_norm", "layer_norm", "--device", "cpu"]
    assert main([*call, "-q"]) == 1
    text = capsys.readouterr().out
    assert "rms_norm" in text
    assert "layer_norm" not in text
    assert main(["check", "layer_norm", "--device", "cpu", "-q"]) == 0
    assert capsys.readouterr().out.startswith("2 passed, 0 failed")
    assert main([*call, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    results = {o["op"]: o["result"] for o in told["outcomes"]}
    assert list(results) == ["rms_norm", "rms_norm (bfloat16)", "layer_norm", "layer_norm (bfloat16)"]
    assert list(results.values()) == ["FAIL", "pass", "pass", "pass"]


def test_results_are_coloured_on_a_terminal_alone(monkeypatch):
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for file, coloured in ((Terminal(), True), (io.StringIO(), False)):
        output.show("t", ("op", "result"), [("a", "pass"), ("b", "FAIL")], file=file)
        assert ("\x1b[32mpass" in file.getvalue()) == coloured
        assert ("\x1b[1;31mFAIL" in file.getvalue()) == coloured


def test_check_hands_over_arrays_of_a_framework(monkeypatch):
    """As on CUDA, where they are made and read back by CuPy or torch."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(pykv, "check_errors", lambda device: None)
    device = devices.Device("cuda:0", "torch", torch.empty(0), devices.of_torch)
    outcomes = {name: check.check(name, device, kept) for name, kept in check.recorded().items()}
    assert {outcomes.pop(name).result for name in ADDRESSED} == {"skipped"}
    assert {o.result for o in outcomes.values()} == {"pass"}


def test_nan_is_an_error():
    one = np.ones(1, np.float32)
    assert check.compare({"a": one * np.float32(np.nan)}, {"a": one})[0] == np.inf
    assert check.compare({"a": one}, {"a": one * np.float32(np.nan)})[1]
    assert check.compare({"a": one}, {"a": np.ones(2, np.float32)})[1] == "a: float32[1], not float32[2]"


@pytest.mark.parametrize("command", ["check", "bench"])
def test_what_cannot_be_done_is_told_in_a_line(capsys, command):
    assert main([command, "rms_nrom"]) == 2
    told = capsys.readouterr().err
    assert told == f"pykv {command}: no operation is called 'rms_nrom'; did you mean rms_norm?\n"
    assert main([command, "--device", "tpu"]) == 2
    assert "no device is called 'tpu'; there are: cpu" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch):
    """Timing that calls once."""

    class Once(bench.Cpu):
        most_copies = 1

        def time(self, calls):
            for call in calls:
                call()
            return 1e-6

    monkeypatch.setattr(bench, "Cpu", Once)


def test_bench_runs_every_operation(capsys, quick, tmp_path):
    pytest.importorskip("ml_dtypes")
    file = tmp_path / "figures.json"
    assert main(["bench", "--device", "cpu", "--tokens", "2", "--json", str(file)]) == 0
    assert "of copy" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["pykv"] == pykv.__version__
    figures = {f["op"]: f for f in written["figures"]}
    assert set(figures) == set(all_ops()) - bench.ADDRESSED
    assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "convert_fp8"} <= set(bench.row_ops())
    row = 2 * 4096
    assert figures["rms_norm"]["num_bytes"] == (2 + 2 + 1) * row  # input, output, weight
    assert figures["fused_add_rms_norm"]["num_bytes"] == (4 + 4 + 1) * row  # both read and written
    assert figures["silu_and_mul"]["num_bytes"] == (4 + 2) * row
    assert figures["rms_norm_dynamic_per_token_quant"]["num_bytes"] == (2 + 1 + 1) * row + 2 * 4  # codes, scales
    tokens, ids = 2 * 8 * 128 * 2, 2 * 8  # keys of two tokens for 8 heads of 128; slots, or whatever else is int64
    assert figures["reshape_and_cache_flash"]["num_bytes"] == 2 * 2 * tokens + ids  # of a cache no more than new tokens
    queries = 32 * 128 * 2
    assert figures["paged_attention"]["num_bytes"] == 2 * tokens + 2 * queries + 2 * 8  # one sequence: table and length
    assert figures["cp_gather_cache"]["num_bytes"] == 2 * 2 * 576 * 2 + (1 + 2) * 8
    assert figures["swap_blocks"]["num_bytes"] == 2 * 8 * tokens + ids  # a block has 16 tokens
    assert figures["copy_blocks"]["num_bytes"] == 2 * 2 * 4 * 8 * tokens + ids  # 4 layers, keys and values
    assert all(f["us"] == f["copy_us"] == pytest.approx(1) for f in figures.values())


def test_an_operation_without_sizes_is_timed_on_its_sample(monkeypatch):
    monkeypatch.setattr(bench, "WORKLOADS", {})
    (case,) = bench.cases(["rotary_embedding"], [7, 8], "float16")
    assert (case.size, case.dtype) == ({}, "float32")
    case.make(bench.Cpu())()


@pytest.mark.parametrize("tokens", [1, 1500, 2049])
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_is_a_right_call_of_any_size(name, tokens):
    (case,) = bench.cases([name], [tokens], "float32")
    case.make(bench.Cpu())()  # an id out of range would raise
    assert case.num_bytes >= 4 * tokens


def test_bench_measures(capsys, no_rich):
    assert main(["bench", "relu2", "--device", "cpu", "--tokens", "4", "--dtype", "float32"]) == 0
    title, headings, _, row = capsys.readouterr().out.splitlines()
    assert title.endswith(", float32")
    figure = dict(zip(headings.replace("copy us", "copy_us").split(), row.split(), strict=False))
    assert figure["op"] == "relu2"
    assert float(figure["us"]) > 0


def test_bench_writes_to_stdout(capsys, quick):
    assert main(["bench", "relu2", "--device", "cpu", "--tokens", "2", "--dtype", "float32", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert [f["op"] for f in json.loads(told.out)["figures"]] == ["relu2"]
    assert "of copy" in told.err


def test_bench_keeps_its_figures_on_an_interrupt(capsys, quick, monkeypatch, tmp_path):
    plain, calls = bench.cases, []

    def make(case, device):
        calls.append(case.op)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return case.make(device)

    def interrupted(*arguments):
        return [dataclasses.replace(case, make=partial(make, case)) for case in plain(*arguments)]

    monkeypatch.setattr(bench, "cases", interrupted)
    monkeypatch.setattr(bench.Cpu, "most_copies", 1)
    file = tmp_path / "figures.json"
    call = ["bench", "relu2", "rms_norm", "--device", "cpu", "--tokens", "2", "--dtype", "float32"]
    assert main([*call, "--json", str(file)]) == 130
    assert [f["op"] for f in json.loads(file.read_text())["figures"]] == ["relu2"]
    told = capsys.readouterr()
    assert "relu2" in told.out
    assert "interrupted: 1 of 2 figures" in told.err


def test_the_bar_names_the_one_at_work(monkeypatch):
    progress = pytest.importorskip("rich.progress").Progress
    told = []
    monkeypatch.setattr(progress, "update", lambda self, task, description: told.append(description))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(output.progress(["a", "b"], "measuring", str.upper)) == ["a", "b"]
    assert told == ["measuring A", "measuring B"]


def test_bench_draws(quick, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.png"
    call = ["bench", "relu2", "rms_norm", "--device", "cpu", "--tokens", "1", "--tokens", "9", "--dtype", "float32"]
    assert main([*call, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_bench_draws_many_operations_by_family(monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, path: drawn.append(self))
    names = sorted(all_ops())
    bench.plot(
        tmp_path / "x.png", "all", [bench.Figure(n, {}, "float32", 100 + i, 2.0, 1.0) for i, n in enumerate(names)]
    )
    panels = [axes for axes in drawn[0].axes if axes.axison]
    assert {"attention", "cache", "mla", "norm", "rotary", "activation"} <= {axes.get_title() for axes in panels}
    told = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in panels]
    assert all(names[0] == "copy" for names in told)
    assert sorted(name for names in told for name in names[1:]) == names
    looks = [[(line.get_color(), line.get_marker()) for line in axes.lines] for axes in panels]
    assert all(len(set(look)) == len(look) for look in looks)


def test_sensors_tell_the_range_of_what_they_saw(monkeypatch):
    clocks = iter([1980, 1500, 1755])

    class Nvml:
        def nvmlInit_v2(self):
            return 0

        def nvmlDeviceGetHandleByPciBusId_v2(self, bus, gpu):
            assert bus == b"0000:17:00.0"
            gpu._obj.value = 7
            return 0

        def nvmlDeviceGetClockInfo(self, gpu, clock, value):
            assert gpu.value == 7
            if clock != 1:
                return 3  # not supported
            value._obj.value = next(clocks)
            return 0

        def nvmlDeviceGetPowerUsage(self, gpu, value):
            value._obj.value = 512_000  # mW
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    sensors = timing.Sensors("0000:17:00.0")
    for _ in range(3):
        sensors.ask()
    assert sensors.seen() == {
        "sm_mhz": {"least": 1500, "median": 1755, "most": 1980},
        "watts": pytest.approx({"least": 512, "median": 512, "most": 512}),
    }


def test_without_sensors_nothing_is_told(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    sensors = timing.Sensors("0000:17:00.0")
    sensors.ask()
    assert sensors.seen() == {}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("read", "written"), [(1 << 20, 1 << 20), (4096, 4096), (1 << 25, 1 << 25)])
def test_the_copy_on_cuda_copies_numbers_like_those_of_the_calls(cupy, read, written, dtype):
    pytest.importorskip("ml_dtypes")
    device, made = bench.Cuda(), []
    take = device.cupy.empty

    class Kept:
        """CuPy, of which the arrays that are made are kept."""

        def __getattr__(self, name):
            return getattr(cupy, name)

        def empty(self, *arguments):
            made.append(take(*arguments))
            return made[-1]

    device.cupy = Kept()
    call = device.copy(read, written, dtype)
    made[-1].fill(0)
    call()
    wanted = np.resize(timing._normal(dtype).view(np.uint8), written)
    assert (cupy.asnumpy(made[-1]).view(np.uint8).ravel() == wanted).all()


def test_bench_tells_clocks_and_power_on_cuda(cupy, tmp_path):
    file = tmp_path / "figures.json"
    call = ["bench", "relu2", "--device", "cuda:0", "--tokens", "64", "--dtype", "float16"]
    assert main([*call, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    if "sm_mhz" in written["device"]:
        assert 0 < written["device"]["sm_mhz"]["least"] <= written["device"]["sm_mhz"]["most"] < 10_000
    assert all(f["us"] > 0 and f["copy_us"] > 0 for f in written["figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_norm", "swap_blocks_batch"], "swap_blocks_batch: takes addresses; see benchmarks/cache"),
        (["--json", "/no/such/folder/f.json"], "/no/such/folder/f.json: there is no folder /no/such/folder"),
        (["--plot", "f.png"], "--plot needs matplotlib: pip install 'pykv-kernels[cli]'"),
        (["--device", "cpu"], "bfloat16 in NumPy or CuPy needs the package ml_dtypes; or try --dtype float16"),
    ],
)
def test_bench_says_what_is_missing(capsys, monkeypatch, arguments, message):
    for module in ("matplotlib", "matplotlib.figure", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench_refuses_sizes(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--tokens", "0"])
    assert "must be a whole number of at least 1, got '0'" in capsys.readouterr().err
