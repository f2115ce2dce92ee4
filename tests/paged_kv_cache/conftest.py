import pytest

import pykv


@pytest.fixture(params=["torch", "cupy"])
def module(request):
    """A library whose caches live on the GPU."""
    if request.config.getoption("--device") == "cpu":
        pytest.skip("tests of the CPU are asked for")
    if not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("no CUDA in this pykv, or no device")
    module = pytest.importorskip(request.param)
    if not module.cuda.is_available():
        pytest.skip(f"{request.param} sees no CUDA device")
    return module
