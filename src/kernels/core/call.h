// What every C entry point does before its kernel runs: checks, the choice of device and twin, and errors.
//
//   return guarded("rms_norm", [&](Call& call) {
//     Dim hidden{"hidden_size"};
//     Tensor x = call.read("input", input).dtype(kFloats).last_dim(hidden).contiguous_rows();
//     ...
//     call.run(stream, RmsNormArgs{...}, rms_norm_cpu, PYKV_CUDA(rms_norm_cuda));
//   });
#pragma once

#include <new>
#include <type_traits>

#include "core/check.h"
#include "core/device_scope.h"
#include "core/float_environment.h"
#include "core/launch.h"

namespace pykv {

// In a build without CUDA the CUDA twins do not exist.
#if defined(PYKV_WITH_CUDA)
#define PYKV_CUDA(f) f
#else
#define PYKV_CUDA(f) nullptr
#endif

template <class Args>
using Twin = void (*)(const Args&, const Launch&);

// Keeps "op: message" for pykv_last_error() of this thread.  Never fails: it needs no memory of the heap.
pykv_status set_last_error(pykv_status status, const char* op, const char* message) noexcept;

// "op: argument: 99 is out of range [0, 64); it was not used", or what is wrong with a row
pykv_status set_last_error(const ErrorWord& word) noexcept;

class Call {
 public:
  explicit Call(const char* op) : op_(op) {}

  // An array on the device of the call.  The first array that names a device decides it.
  Tensor read(const char* name, const DLTensor* t) {
    const Tensor x = write(name, t);
    check_number(x);
    return x;
  }
  Tensor write(const char* name, const DLTensor* t) {
    const Tensor x(name, t);
    on_device(x);
    return x;
  }
  // An array anywhere: the op looks after its device itself.
  Tensor anywhere(const char* name, const DLTensor* t) { return Tensor(name, t); }

  // A scale, or one for each of `heads`: on the device of the call or on the host; null means 1.
  void scale(Scale& into, const char* name, const DLTensor* t, int64_t heads);

  // A float32 number that must be given, on the device of the call or on the host.
  Parameter parameter(const char* name, const DLTensor* t);

  const char* op() const { return op_; }
  bool on_cuda() const { return device_.device_type == kDLCUDA; }
  DLDevice device() const { return device_; }
  void set_device(DLDevice device) { device_ = device; }

  template <class Args>
  void run(void* stream, const Args& args, std::type_identity_t<Twin<Args>> cpu,
           std::type_identity_t<Twin<Args>> cuda) {
    if (device_.device_type == kDLExtDev) return;
    if (on_cuda()) {
      DeviceScope scope(device_.device_id, stream);
      cuda(args, scope.launch());
      scope.finish();
    } else {
      ErrorWord word{};
      cpu(args, Launch{nullptr, 0, &word});
      if (word.claimed) fail_out_of_range(word);
    }
  }

  [[noreturn]] static void no_cuda();
  [[noreturn]] static void fail_out_of_range(const ErrorWord& word);

 private:
  void on_device(const Tensor& t) {
    const DLDevice d = t.device();
    if (!device_known_) device_ = d;
    device_known_ = true;
    if (((d.device_type ^ device_.device_type) | (d.device_id ^ device_.device_id)) != 0) fail_device(t);
  }
  [[noreturn]] void fail_device(const Tensor& t) const;

  const char* op_;
  DLDevice device_{kDLCPU, -1};
  bool device_known_ = false;
};

// A function of its own, so that no arithmetic of the body is done before the environment is set.
template <class Body>
[[gnu::noinline]] void run_body(const char* op, Body& body) {
  Call call(op);
  body(call);
}

// Runs an entry: exceptions become a status and a message that starts with the op's name.
template <class Body>
pykv_status guarded(const char* op, Body&& body) {
  const UsualArithmetic usual;
  try {
    run_body(op, body);
    return PYKV_OK;
  } catch (const Error& e) {
    return set_last_error(e.status(), op, e.what());
  } catch (const std::bad_alloc&) {
    return set_last_error(PYKV_RUNTIME_ERROR, op, "out of memory on the host");
  } catch (const std::exception& e) {
    return set_last_error(PYKV_RUNTIME_ERROR, op, e.what());
  } catch (...) {
    return set_last_error(PYKV_RUNTIME_ERROR, op, "unknown failure");
  }
}

}  // namespace pykv
