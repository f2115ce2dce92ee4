// q_out[t, h] = concat(ql_nope[t, h], q_pe[t, h]), bit by bit: concat_rows.cuh with heads as rows.  Memory-bound.
#include "cache/mla/concat_mla_q.h"
#include "cache/mla/concat_rows.cuh"

namespace pykv {
namespace {

// Bytes as they are.
template <class V>
struct RawMover {
  using Loaded = V;
  static __device__ const V& convert(const V& v, const Quotient&) { return v; }
};

struct HeadTarget {
  char* out;
  RowMap rows;
  template <int kRows>
  struct Offsets {
    int64_t at[kRows];
  };
  __device__ void prefetch_ids(uint32_t, uint32_t) const {}
  template <int kRows>
  __device__ Offsets<kRows> ids(uint32_t first, uint32_t) const {
    Offsets<kRows> offsets;
    rows.offsets(first, offsets.at);
    return offsets;
  }
  template <int kRows>
  __device__ char* place(const Offsets<kRows>& offsets, int i) const {
    return out + offsets.at[i];
  }
  template <class V>
  static __device__ void store(char* to, const V& v) {
    store_vec(to, v);
  }
};

template <class V, int kRows>
__global__ void __launch_bounds__(kConcatThreads)
    concat_mla_q_kernel(const __grid_constant__ ConcatPlan plan, const __grid_constant__ HeadTarget target,
                        uint32_t first_row) {
  concat_rows<RawMover<V>, kRows>(plan, target, [] { return 1.0f; }, first_row);
}

template <class V>
void launch_kernel(const ConcatMlaQArgs& args, const Launch& launch) {
  const int64_t item = args.element_bytes, rows = args.num_tokens * args.num_heads;
  const auto vectors_of = [&](const QueryPart& p) { return p.size * item / static_cast<int64_t>(sizeof(V)); };
  const auto vector_step = [&](const QueryPart& p) { return p.dim / item * static_cast<int64_t>(sizeof(V)); };
  const auto map = [&](const QueryPart& p) { return RowMap{Divider(args.num_heads), p.token, p.head}; };
  const auto part = [&](const QueryPart& p) { return ConcatPart{p.data, map(p), vector_step(p)}; };
  const int64_t vectors = vectors_of(args.nope) + vectors_of(args.pe);
  if (rows >= int64_t{1} << 31 || vectors >= int64_t{1} << 30)
    fail(PYKV_NOT_IMPLEMENTED, "2^31 heads, or heads of 2^30 elements, are not supported");
  const ConcatPlan plan{part(args.nope),         part(args.pe),
                        Divider(vectors),        static_cast<uint32_t>(vectors_of(args.nope)),
                        vector_step(args.pe_to), static_cast<uint32_t>(rows)};
  // where the latent part needs no copy, the vectors of a row begin with the other one
  const HeadTarget target{args.nope.size ? args.nope_to.data : args.pe_to.data, map(args.pe_to)};
  dispatch_rows_per_thread<4>(rows, vectors, launch, [&]<int kRows> {
    for_each_concat_launch(rows, vectors, kRows, [&](uint32_t first, uint32_t blocks) {
      launch_dependent(concat_mla_q_kernel<V, kRows>, blocks, kConcatThreads, launch, "concat_mla_q", plan, target,
                       first);
    });
  });
}

// The widest vector that all addresses, distances and sizes allow: an element where elements lie apart.
int64_t vector_bytes(const ConcatMlaQArgs& args) {
  uint64_t bits = 16;
  for (const QueryPart* p : {&args.nope, &args.pe, &args.nope_to, &args.pe_to}) {
    if (p->size == 0) continue;
    if (p->dim != args.element_bytes && p->size > 1) return args.element_bytes;
    bits |= reinterpret_cast<uintptr_t>(p->data) | static_cast<uint64_t>(p->size * args.element_bytes);
    if (args.num_tokens > 1) bits |= static_cast<uint64_t>(p->token);
    if (args.num_heads > 1) bits |= static_cast<uint64_t>(p->head);
  }
  return static_cast<int64_t>(bits & -bits);
}

}  // namespace

void concat_mla_q_cuda(const ConcatMlaQArgs& args, const Launch& launch) {
  switch (vector_bytes(args)) {
    case 16:
      return launch_kernel<uint4>(args, launch);
    case 8:
      return launch_kernel<uint2>(args, launch);
    case 4:
      return launch_kernel<uint32_t>(args, launch);
    case 2:
      return launch_kernel<uint16_t>(args, launch);
    default:
      return launch_kernel<uint8_t>(args, launch);
  }
}

}  // namespace pykv
