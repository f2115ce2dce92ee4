// A C++17 program over pykv/kernels.hpp.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <pykv/kernels.hpp>
#include <type_traits>
#include <vector>

using pykv::ConstTensor;
using pykv::Tensor;

static_assert(!std::is_convertible_v<ConstTensor, DLTensor*>, "what is read cannot be written");
static_assert(std::is_convertible_v<Tensor, DLTensor*> && std::is_convertible_v<Tensor, const DLTensor*>);
static_assert(pykv::dtype_of<float>().code == kDLFloat && pykv::dtype_of<int32_t>().bits == 32);

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition), std::exit(1); \
  } while (false)

namespace {

template <class Thrown, class F>
Thrown thrown_by(F&& f) {
  try {
    f();
  } catch (const Thrown& error) {
    return error;
  }
  std::fprintf(stderr, "nothing was thrown\n");
  std::exit(1);
}

void rows_and_errors() {
  const std::vector<float> x = {3, 0, 4, 1, 1, 1}, w = {1, 2, 1};
  std::vector<float> y(6);
  const Tensor out(y.data(), {2, 3});
  pykv::call(pykv_rms_norm, out, ConstTensor(x.data(), {2, 3}), ConstTensor(w), 0.0);
  EXPECT(std::fabs(y[0] - 3 / std::sqrt(25.0f / 3)) < 1e-6f && std::fabs(y[4] - 2) < 1e-6f);
  pykv::call(pykv_rms_norm, out, ConstTensor(x.data(), {2, 3}), nullptr, 0.0, nullptr);  // no weight, a stream
  EXPECT(std::fabs(y[4] - 1) < 1e-6f);

  const auto error = thrown_by<pykv::Error>(
      [&] { pykv::call(pykv_rms_norm, out, ConstTensor(x.data(), {2, 3}), ConstTensor(w.data(), {2}), 0.0); });
  EXPECT(error.status() == PYKV_VALUE_ERROR);
  EXPECT(std::string(error.what()) == "rms_norm: weight: dimension 0 must equal hidden_size = 3, got shape [2]");
  const auto type = thrown_by<pykv::Error>(
      [&] { pykv::call(pykv_rms_norm, out, ConstTensor(x.data(), {2, 3}, pykv::int32), nullptr, 0.0); });
  EXPECT(type.status() == PYKV_TYPE_ERROR);
}

void views() {
  std::vector<int64_t> data = {0, 1, 2, 3, 4, 5};
  Tensor a(data.data(), {2, 3});
  Tensor b = a.slice(1, 1, 3);
  EXPECT(b.size(0) == 2 && b.size(1) == 2 && b.stride(0) == 3 && b.stride(1) == 1);
  EXPECT(static_cast<const DLTensor*>(b)->data == &data[1]);
  a = b;  // the copy has shapes of its own
  b = Tensor(data);
  const DLTensor* raw = a;
  EXPECT(raw->ndim == 2 && raw->shape[1] == 2 && raw->strides[0] == 3);
  EXPECT(static_cast<const DLTensor*>(b)->shape[0] == 6);
  const ConstTensor turned = ConstTensor(data.data(), {3, 2}).with_strides({1, 3});
  EXPECT(static_cast<const DLTensor*>(turned)->strides[1] == 3);
  const int64_t sizes[] = {1, 6};
  EXPECT(ConstTensor(data.data(), {sizes, 2}).size(1) == 6);
  thrown_by<std::out_of_range>([&] { a.slice(1, 1, 3); });
  thrown_by<std::out_of_range>([&] { a.slice(2, 0, 0); });
  thrown_by<std::invalid_argument>([&] { a.with_strides({1}); });
  thrown_by<std::length_error>([&] { Tensor(data.data(), {1, 1, 1, 1, 1, 1, 1, 1, 6}); });
  const DLTensor* on_gpu = nullptr;
  const Tensor half(static_cast<void*>(data.data()), {4}, pykv::bfloat16, pykv::cuda(1));
  on_gpu = half;
  EXPECT(on_gpu->device.device_type == kDLCUDA && on_gpu->device.device_id == 1 && on_gpu->dtype.code == kDLBfloat);
}

void lists() {
  std::vector<float> k = {0, 1, 2, 3, 4, 5}, v = {6, 7, 8, 9, 10, 11};
  const pykv::TensorList keys({Tensor(k.data(), {3, 2})}), values = pykv::TensorList({Tensor(v.data(), {3, 2})});
  const std::vector<int64_t> mapping = {2, 0};
  pykv::call(pykv_copy_blocks, keys, values, ConstTensor(mapping.data(), {1, 2}));
  EXPECT(k[0] == 4 && k[1] == 5 && k[2] == 2 && v[0] == 10 && v[1] == 11);
}

// One query over three tokens that lie in blocks 2 and 0, heads before tokens (HND) in the cache.
void attention(DLTensor* workspace) {
  constexpr int64_t blocks = 3, block_size = 2, heads = 2, head_size = 8, tokens = 3;
  std::vector<float> k(tokens * heads * head_size, 0.0f), v, q(heads * head_size, 1.0f), out(heads * head_size);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < heads * head_size; ++i) v.push_back(static_cast<float>(t + i / head_size));
  std::vector<float> kc(blocks * block_size * heads * head_size, NAN), vc = kc;
  const std::vector<int64_t> slots = {4, 5, 0};
  const std::vector<int32_t> table = {2, 0}, lens = {3};
  const pykv::Sizes hnd = {heads * block_size * head_size, head_size, block_size * head_size, 1};
  const Tensor key_cache = Tensor(kc.data(), {blocks, block_size, heads, head_size}).with_strides(hnd);
  const Tensor value_cache = Tensor(vc.data(), {blocks, block_size, heads, head_size}).with_strides(hnd);
  pykv::call(pykv_reshape_and_cache_flash, ConstTensor(k.data(), {tokens, heads, head_size}),
             ConstTensor(v.data(), {tokens, heads, head_size}), key_cache, value_cache, ConstTensor(slots), "auto",
             nullptr, nullptr);
  pykv_paged_attention_options options = PYKV_PAGED_ATTENTION_OPTIONS;
  options.workspace = workspace;
  pykv::call(pykv_paged_attention, Tensor(out.data(), {1, heads, head_size}),
             ConstTensor(q.data(), {1, heads, head_size}), key_cache, value_cache, ConstTensor(table.data(), {1, 2}),
             ConstTensor(lens), &options);
  for (int64_t i = 0; i < heads * head_size;
       ++i)  // equal logits: the mean of 0, 1, 2, and one more for the second head
    EXPECT(std::fabs(out[static_cast<size_t>(i)] - 1 - static_cast<float>(i / head_size)) < 1e-6f);
}

void workspaces() {
  EXPECT(pykv::paged_attention_workspace_size(1, 1, 2, 2, 8, false, pykv::cpu) == 0);
  EXPECT(static_cast<DLTensor*>(pykv::Workspace()) == nullptr);
  int freed = 0;
  auto allocate = [](size_t bytes) { return std::aligned_alloc(256, bytes); };
  auto release = [&](void* memory) { std::free(memory), ++freed; };
  {
    const pykv::Workspace none(0, pykv::cpu, allocate, release);
    EXPECT(static_cast<DLTensor*>(none) == nullptr);
    const pykv::Workspace first(1024, pykv::cpu, allocate, release);
    const pykv::Workspace second = first;
    EXPECT(static_cast<DLTensor*>(second)->shape[0] == 1024);
    attention(none);
    attention(second);
    EXPECT(freed == 0);
  }
  EXPECT(freed == 1);
  thrown_by<std::bad_alloc>(
      [] { pykv::Workspace(8, pykv::cpu, [](size_t) -> void* { return nullptr; }, [](void*) {}); });
}

}  // namespace

int main() {
  rows_and_errors();
  views();
  lists();
  workspaces();
  std::puts("ok");
}
