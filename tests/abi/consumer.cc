// A C++ program that links the library: writes a paged cache and attends to it.
#include <pykv/kernels.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

// A compact host tensor over memory that the caller owns.
struct Host {
  std::vector<int64_t> shape;
  DLTensor tensor{};
  Host(void* data, DLDataType dtype, std::vector<int64_t> sizes) : shape(std::move(sizes)) {
    tensor.data = data;
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<int32_t>(shape.size());
    tensor.dtype = dtype;
    tensor.shape = shape.data();
  }
};

constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kI64{kDLInt, 64, 1};

bool ok(pykv_status status) {
  if (status != PYKV_OK) std::fprintf(stderr, "%s\n", pykv_last_error());
  return status == PYKV_OK;
}

}  // namespace

int main() {
  constexpr int64_t blocks = 3, block_size = 2, heads = 1, head_size = 8, tokens = 3;
  std::vector<float> k(tokens * head_size), v(tokens * head_size), kc(blocks * block_size * head_size, NAN), vc = kc;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < head_size; ++d) k[t * head_size + d] = 0, v[t * head_size + d] = static_cast<float>(t);
  std::vector<int64_t> slots = {4, 5, 0}, table = {2, 0}, lens = {3};
  std::vector<float> q(head_size, 1), out(head_size);
  Host key(k.data(), kF32, {tokens, heads, head_size}), value(v.data(), kF32, {tokens, heads, head_size});
  Host key_cache(kc.data(), kF32, {blocks, block_size, heads, head_size});
  Host value_cache(vc.data(), kF32, {blocks, block_size, heads, head_size});
  Host slot_mapping(slots.data(), kI64, {tokens}), tables(table.data(), kI64, {1, 2}), seq_lens(lens.data(), kI64, {1});
  Host query(q.data(), kF32, {1, heads, head_size}), result(out.data(), kF32, {1, heads, head_size});
  if (!ok(pykv_reshape_and_cache_flash(&key.tensor, &value.tensor, &key_cache.tensor, &value_cache.tensor,
                                       &slot_mapping.tensor, "auto", nullptr, nullptr, nullptr)))
    return 1;
  if (!ok(pykv_paged_attention(&result.tensor, &query.tensor, &key_cache.tensor, &value_cache.tensor, &tables.tensor,
                               &seq_lens.tensor, nullptr, nullptr)))
    return 2;
  for (float x : out)
    if (std::fabs(x - 1) > 1e-6f) return 3;  // equal logits: the mean of 0, 1, 2
  std::puts("ok");
  return 0;
}
