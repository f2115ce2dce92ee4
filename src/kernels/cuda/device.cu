#include <atomic>
#include <string_view>

#include "core/call.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace pykv {
namespace {

constexpr int kMaxDevices = 64;

// Static storage of the module: zero from the start and never allocated, so its first use may lie in a graph capture.
__device__ ErrorWord device_error_word;

// Things that a capture would refuse in other modes: loading a module, asking for an address.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void check_device(int device) {
  if (device < 0 || device >= kMaxDevices) fail(PYKV_VALUE_ERROR, "CUDA device %d does not exist", device);
}

// An attribute that is never 0, asked for once a device.
struct Cached {
  std::atomic<int> values[kMaxDevices];

  int get(cudaDeviceAttr attribute, int device) {
    check_device(device);
    int value = values[device].load(std::memory_order_relaxed);
    if (value == 0) {
      cuda_check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
      values[device].store(value, std::memory_order_relaxed);
    }
    return value;
  }
};

}  // namespace

int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return n;
}

int num_sms(int device) {
  static Cached cached;
  return cached.get(cudaDevAttrMultiProcessorCount, device);
}

bool overlaps_kernels(int device) {
  static Cached cached;
  return cached.get(cudaDevAttrComputeCapabilityMajor, device) >= 9;
}

// The only architecture with kernels of its own.
constexpr bool kBuiltForWarpgroups = std::string_view(PYKV_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;

bool has_warpgroups(int device) {
  static Cached cached;
  return kBuiltForWarpgroups && cached.get(cudaDevAttrComputeCapabilityMajor, device) == 9;
}

const char* device_note(int device) {
  int major = 0;
  const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
  if (!known) cudaGetLastError();
  if (!known || major != 9 || kBuiltForWarpgroups) return "";
  return "this GPU has compute capability 9.0, and this build, for " PYKV_CUDA_ARCHITECTURES
         ", lacks the kernels made for it: attention takes two to three times as long; "
         "PYKV_CUDA_ARCHS=90a-real in the environment of the installation builds them";
}

int enter_device(int device) {
  int previous = -1;
  const cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice) {
    cudaGetLastError();
    fail(PYKV_RUNTIME_ERROR, "no CUDA device can be used here: %s", cudaGetErrorString(status));
  }
  cuda_check(status, "cudaGetDevice");
  if (previous != device) cuda_check(cudaSetDevice(device), "cudaSetDevice");
  return previous == device ? -1 : previous;
}

void leave_device(int previous) {
  if (previous >= 0) cudaSetDevice(previous);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

ErrorWord* error_word(int device) {
  static std::atomic<ErrorWord*> cached[kMaxDevices];
  check_device(device);
  ErrorWord* word = cached[device].load(std::memory_order_acquire);
  if (!word) {
    RelaxedCapture relaxed;
    cuda_check(cudaGetSymbolAddress(reinterpret_cast<void**>(&word), device_error_word), "cudaGetSymbolAddress");
    cached[device].store(word, std::memory_order_release);
  }
  return word;
}

ErrorWord take_error_word(int device) {
  const int previous = enter_device(device);
  ErrorWord word{};
  const ErrorWord clear{};
  ErrorWord* on_device = error_word(device);
  cudaError_t status = cudaDeviceSynchronize();
  if (status == cudaSuccess) status = cudaMemcpy(&word, on_device, sizeof word, cudaMemcpyDeviceToHost);
  if (status == cudaSuccess && word.claimed)
    status = cudaMemcpy(on_device, &clear, sizeof clear, cudaMemcpyHostToDevice);
  leave_device(previous);
  cuda_check(status, "reading the error word");
  return word;
}

void stream_wait(int device, void* stream, void* producer) {
  const int previous = enter_device(device);
  cudaEvent_t event = nullptr;
  cudaError_t status = cudaErrorStreamCaptureUnsupported;
  if (!is_capturing(stream) && !is_capturing(producer)) {
    status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (status == cudaSuccess) status = cudaEventRecord(event, static_cast<cudaStream_t>(producer));
    if (status == cudaSuccess) status = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event, 0);
    if (event) cudaEventDestroy(event);  // freed by the runtime once it has fired
  }
  leave_device(previous);
  if (status == cudaErrorStreamCaptureUnsupported)
    fail(PYKV_RUNTIME_ERROR, "arrays of two streams cannot be ordered inside a graph capture");
  cuda_check(status, "ordering two streams");
}

void* mark_stream(int device, void* stream) {
  const int previous = enter_device(device);
  cudaEvent_t event = nullptr;
  cudaError_t status = cudaSuccess;
  if (!is_capturing(stream)) {
    status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (status == cudaSuccess) status = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess && event) cudaEventDestroy(event);
  }
  leave_device(previous);
  cuda_check(status, "marking a stream");
  return event;
}

bool mark_passed(void* mark) {
  RelaxedCapture relaxed;  // another stream of this thread may be capturing
  const auto event = static_cast<cudaEvent_t>(mark);
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cudaEventDestroy(event);
  cuda_check(status, "asking for a mark");
  return true;
}

}  // namespace pykv
