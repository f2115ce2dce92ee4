#include "core/call.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace pykv {

void Call::fail_device(const Tensor& t) const {
  const auto name = [](DLDevice x) {
    // those that are only checked (kDLExtDev) have -1 for the host
    return x.device_type == kDLCPU || x.device_id < 0 ? std::string("cpu") : "cuda:" + std::to_string(x.device_id);
  };
  t.fail(PYKV_VALUE_ERROR, "must lie on %s like the arguments before it, got %s", name(device_).c_str(),
         name(t.device()).c_str());
}

void Call::scale(Scale& into, const char* name, const DLTensor* t, int64_t heads) {
  if (!t) return;
  Tensor x(name, t);
  x.dtype({DType::kFloat32});
  check_number(x);
  const int64_t count = x.numel();
  if (count != 1) x.rank_between(0, 1);  // one element may have any shape: [1, 1], too
  if (count != 1 && count != heads)
    x.fail(PYKV_VALUE_ERROR,
           heads == 1 ? "must have 1 element, got shape %s"
                      : "must have 1 element, or one for each of the %2$" PRId64 " heads, got shape %1$s",
           x.shape_string().c_str(), heads);
  const int64_t step = count == 1 ? 0 : x.stride(0);
  const float* data = static_cast<const float*>(x.data());
  if (x.device().device_type == kDLCUDA) on_device(x);
  if (x.device().device_type == kDLCUDA || !on_cuda()) {
    into.data = data;
    into.stride = step;
    return;
  }
  if (count > Scale::kMaxOnHost)
    x.fail(PYKV_NOT_IMPLEMENTED, "more than %d scales must lie on the device, got %" PRId64 " on the host",
           Scale::kMaxOnHost, count);
  into.stride = count > 1;
  for (int64_t i = 0; i < count; ++i) into.values[i] = data[i * step];
}

Parameter Call::parameter(const char* name, const DLTensor* t) {
  if (!t) fail(PYKV_TYPE_ERROR, "%s: is required", name);
  Scale s;
  scale(s, name, t, 1);
  return {s.data, s.values[0]};
}

void Call::no_cuda() { fail(PYKV_NOT_IMPLEMENTED, "got CUDA arrays, but this pykv was %s", pykv_build_note()); }

namespace {

// What is wrong, without the op and the argument.
struct ReportText {
  char text[96];

  explicit ReportText(const ErrorWord& word) noexcept {
    const char* format = word.bound == kRowHasNan    ? "row %lld holds NaN"
                         : word.bound == kRowIsEmpty ? "row %lld has nothing to choose from"
                                                     : "%lld is out of range [0, %lld); it was not used";
    std::snprintf(text, sizeof text, format, word.value, word.bound);
  }
};

}  // namespace

pykv_status set_last_error(const ErrorWord& word) noexcept {
  return set_last_error(PYKV_VALUE_ERROR, word.what, ReportText(word).text);
}

void Call::fail_out_of_range(const ErrorWord& word) {
  // `what` is "op: argument"; guarded() puts the op before every message, so it is left out here
  fail(PYKV_VALUE_ERROR, "%s: %s", std::strchr(word.what, ':') + 2, ReportText(word).text);
}

}  // namespace pykv
