#include "sampling/row_inputs.h"

#include <algorithm>
#include <cmath>

namespace pykv {
namespace {

void check_one_or_each(const Tensor& x, const Dim& rows) {
  if (x.numel() != 1 && x.numel() != rows)
    x.fail(PYKV_VALUE_ERROR, "must have 1 element, or one for each of the %lld rows, got shape %s",
           static_cast<long long>(rows), x.shape_string().c_str());
}

}  // namespace

RowNumbers row_numbers(Call& call, const char* name, const DLTensor* t, const Dim& rows) {
  if (!t) return {};
  Tensor x(name, t);
  x.rank_between(0, 1).dtype({DType::kFloat32});
  check_one_or_each(x, rows);
  check_number(x);
  const float* data = static_cast<const float*>(x.data());
  if (x.device().device_type == kDLCPU && x.numel() == 1) return {nullptr, 0, *data, true};
  call.read(name, t);  // on the device of the others
  return {data, x.numel() == 1 ? 0 : x.stride(0), 0.0f, true};
}

RowCounts row_counts(Call& call, const char* name, const DLTensor* t, const Dim& rows) {
  if (!t) return {};
  Tensor x(name, t);
  x.rank_between(0, 1).dtype({DType::kInt32, DType::kInt64, DType::kFloat32});
  if (x.type() == DType::kFloat32) {  // a Python number
    const RowNumbers number = row_numbers(call, name, t, rows);
    if (number.data || number.value != std::trunc(number.value))
      x.fail(PYKV_TYPE_ERROR, "must be an integer, or an array of int32 or int64");
    constexpr float kTooLarge = 1 << 24;  // for a float32 to be exact
    if (number.value >= kTooLarge)
      x.fail(PYKV_VALUE_ERROR, "must be below 2**24 where it is one number, got %g", double{number.value});
    return {{}, static_cast<int64_t>(std::max(number.value, 0.0f)), true};
  }
  Index list = call.read(name, t).index();
  check_one_or_each(x, rows);
  if (x.numel() == 1) list.stride = 0;
  return {list, 0, true};
}

}  // namespace pykv
