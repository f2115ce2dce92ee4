// Rows that row_norm.cuh does not hold in registers: too wide, or not of whole aligned packs.
#pragma once

#include "cuda/dependent.cuh"
#include "norm/row_sources.cuh"
#include "norm/row_sums.cuh"
#include "norm/store_by_largest.cuh"

namespace pykv {
namespace {

// Rows that are read again for each pass: one block each.
template <class Source, class Result, bool kCentred>
__global__ __launch_bounds__(1024) void row_norm_again_kernel(const __grid_constant__ typename Result::Args args,
                                                              float inverse_size) {
  using T = typename Source::Element;
  const int thread = threadIdx.x, threads = blockDim.x;
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size));
  const Part part = Result::part_of(args, blockIdx.x);
  begin_dependent();

  const Source source(args, part);
  Result result(args, part);
  const RowReducer<0> reducer(threads);
  const auto value = [&](int pack) { return source.value(source.load(pack)); };
  float centres[1] = {}, sums[1] = {}, centre = 0.0f;
  if constexpr (kCentred) {
    for (int p = thread; p < packs; p += threads) centres[0] += sum_of(to_floats(value(p)));
    centre = mean_of(reducer.sum<0>(centres), static_cast<int>(args.hidden_size), inverse_size);
  }
#pragma unroll 2
  for (int p = thread; p < packs; p += threads)
    sums[0] += sum_of_squares<kCentred>(to_floats(value(p)), centre, source.input.count(p));
  const float r = rsqrtf(fmaf(reducer.sum<1>(sums), inverse_size, args.epsilon));

  // One pass over packs first, first + step, ... of a row or of a part of it.
  const auto each = [&](const Source& from, const Result& to, int first, int step, int end, auto use) {
    for (int p = first; p < end; p += step) {
      const auto z = from.value(from.load(p));
      typename Result::Raw beside;
      to.load(p, beside);
      if constexpr (kHasOwn<Result>) to.load_own(p, beside);
      use(p, z, to.scaled(p, normed<kCentred>(z, centre, r), beside));
    }
  };
  if constexpr (Result::kLargest == Largest::kNothing) {
    each(source, result, thread, threads, packs, [&](int p, const auto& z, const auto& y) {
      source.keep(p, z);
      result.store(p, y);
    });
  } else {
    const auto largest = [&](const Source& from, const Result& to, int first, int step, int end) {
      float most = 0.0f;
      each(from, to, first, step, end, [&](int, const auto&, const auto& y) { most = fmaxf(most, largest_of(y)); });
      return most;
    };
    const auto store = [&](const Source& from, const Result& to, int first, int step, int end, float scale) {
      const typename Result::EitherCoder coder(scale, args.int8);
      each(from, to, first, step, end, [&](int p, const auto& z, const auto& y) {
        from.keep(p, z);
        to.store(p, y, coder);
      });
    };
    if constexpr (Result::kLargest == Largest::kOfGroups) {
      const int size = result.group_size(), lane = thread % 32, group_packs = packs_of<T>(size);
      for (int group = thread / 32; group < part.size / size; group += threads / 32) {
        const Part within{part.row, part.first + group * size, size};
        const Source from(args, within);
        const Result to(args, within);
        const float scale = to.scale_of_either(warp_reduce(largest(from, to, lane, 32, group_packs), 32, Maximum()));
        if (lane == 0) to.store_scale(group, scale);
        store(from, to, lane, 32, group_packs, scale);
      }
    } else {
      const float scale =
          result.scale_of_either(reducer.template maximum<2>(largest(source, result, thread, threads, packs)));
      if (thread == 0) result.store_scale(0, scale);
      store(source, result, thread, threads, packs, scale);
    }
  }
}

}  // namespace
}  // namespace pykv
