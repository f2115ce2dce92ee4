// The first k of a row that lies in the shared memory of a cluster's blocks, in the order of their columns.
//
// A rough bound tells most keys apart from the first k.  The others are counted in bins, which divide a range of keys, and all
// blocks learn what each of them has in every bin.  So all know in which bin the k-th key lies, and go on with that one, until few
// keys are left, which all get.  No block waits for what one works out for all, and each writes what it has itself.
//
// Such a kernel runs for some microseconds, in which the instructions themselves have to be read: loops are not unrolled.  One row of
// 128256 in fp32, k = 2048, on an H200: 8.1 us; a launch with the read alone 1.8, with what blocks tell each other 3.3.
#pragma once

#include "cuda/cp_async.cuh"
#include "sampling/row_blocks.cuh"

namespace pykv {

constexpr int kRangeBits = 8, kRangeBins = 1 << kRangeBits;
constexpr int kFewKeys = 32;  // a lane for each

struct KthKeyMemory {
  ExchangeMemory exchange;
  uint64_t barriers[2];                                            // of counts, and of keys
  alignas(16) uint16_t counts[kMostBlocks][kRangeBins];            // of each block
  alignas(16) uint32_t bins[kRangeBins];                           // of this one
  alignas(16) uint32_t sums[kRangeBins], sums_before[kRangeBins];  // of all blocks, and of those before this one
  uint64_t keys[kFewKeys];
  uint32_t num_keys;
  uint32_t bits[kSelectThreads];     // for the block's columns
  uint32_t bounds[2][kSelectWarps];  // of each warp
  SelectMemory select;
};

// Larger keys are among the first k, and of those that equal this one the first `ties` that the block has; so many as `before` are
// in blocks before it.
struct KthKey {
  uint32_t key;
  int ties, before;

  // `missing` of those that equal a key are kept, of which blocks before this one have `tied_before` and this one `own`.
  static __device__ KthKey with_ties(uint32_t key, uint32_t missing, int before, int tied_before, int own) {
    const int kept_before = min(tied_before, static_cast<int>(missing)), ties = static_cast<int>(missing) - kept_before;
    before += kept_before;
    return ties < own ? KthKey{key, ties, before} : KthKey{key - 1, 0, before};
  }
};

template <class T>
class SharedTopK {
  static constexpr int kSize = kPackSize<T>, kStep = kSelectThreads * kSize, kOfThread = 32;
  // The last bits of the keys of 16-bit logits tell nothing.
  static constexpr int kShift = sizeof(T) == 4 ? 0 : std::is_same_v<T, half> ? 13 : 16;
  static constexpr uint32_t kNan = kKeyOfNan >> kShift;

 public:
  static constexpr int kColumns = kOfThread * kSelectThreads;  // of a block, at most

  // Whether a block's part of so many columns has room.
  static bool has_room(int64_t columns, int blocks) { return columns <= int64_t{blocks} * (kColumns - 4 * kSize); }

  // Before blocks announce themselves to each other.
  static __device__ void open(KthKeyMemory& memory) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (uint64_t& barrier : memory.barriers) cluster_open(shared_address(&barrier));
      memory.num_keys = 0;
    }
    if (thread < kRangeBins) memory.bins[thread] = 0;
    memory.bits[thread] = 0;
  }

  // Begins to load.
  __device__ SharedTopK(const RowSlice<T>& slice, T* values, RowExchange& exchange, KthKeyMemory& memory)
      : slice_(slice), values_(values), exchange_(exchange), memory_(memory) {
#pragma unroll 1
    for (int at = first(); at < slice_.width; at += kStep) {
      const int column = slice_.first_vector + at;
      if (column >= slice_.begin && column <= slice_.end - kSize) {
        cp_async_16(shared_address(values_ + at), slice_.row + column);
      } else {
        *reinterpret_cast<Pack<T>*>(values_ + at) = slice_.load(column);
      }
    }
    cp_async_commit();
  }

  // Each thread reads what it has loaded itself.
  static __device__ void wait_for_loads() { cp_async_wait<0>(); }

  // body(place, column) for the first k of the row that the block has; gives whether one is NaN.  k: 1 ... the row's columns.
  template <class Body>
  __device__ bool each_of_first(int k, Body body) {
    uint32_t low, high;
    rough_range(k, low, high);
    const KthKey kth = kth_key(k, low, high);
    const int thread = static_cast<int>(threadIdx.x);
    uint32_t larger = low_key_ > kth.key ? at_low_ : 0, tied = low_key_ == kth.key ? at_low_ : 0, total;
    bool has_nan = low_key_ == kNan && larger != 0;
    each_key([&](uint32_t key, uint32_t bit) {
      if (key > kth.key) larger |= bit;
      if (key == kth.key) tied |= bit;
      has_nan |= key == kNan && key > kth.key;
    });
    if (kth.ties > 0) {
      set_columns(tied);
      uint32_t bits = memory_.bits[thread], kept = 0;
      int place = static_cast<int>(sum_before(static_cast<uint32_t>(__popc(bits)), memory_.select, total));
      for (; bits != 0 && place < kth.ties; bits &= bits - 1, ++place) kept |= bits & (0u - bits);
      memory_.bits[thread] = kept;
      has_nan |= kth.key == kNan;
      __syncthreads();
    }
#pragma unroll 1
    for (; larger != 0; larger &= larger - 1) {
      const int at = place_of(__ffs(static_cast<int>(larger)) - 1);
      atomicOr(&memory_.bits[at / 32], 1u << at % 32);
    }
    __syncthreads();
    uint32_t bits = memory_.bits[thread];
    int place = kth.before + static_cast<int>(sum_before(static_cast<uint32_t>(__popc(bits)), memory_.select, total));
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1, ++place)
      body(place, slice_.first_vector + 32 * thread + __ffs(static_cast<int>(bits)) - 1);
    return has_nan;
  }

 private:
  static __device__ int first() { return static_cast<int>(threadIdx.x) * kSize; }
  static __device__ uint32_t key_of(T x) { return key_of_logit(to_float(x)) >> kShift; }

  // Where the value of a thread's bit lies.
  static __device__ int place_of(int bit) { return first() + bit / kSize * kStep + bit % kSize; }

  // Sets the bits of many columns of each thread: lanes that follow each other have those of a word.
  __device__ void set_columns(uint32_t mask) {
    constexpr int kLanes = 32 / kSize;  // of a word
    const int lane_of_word = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 1
    for (int at = first(); at - first() < slice_.width; at += kStep, mask >>= kSize) {
      uint32_t word = (mask & ((1u << kSize) - 1u)) << (lane_of_word * kSize);
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) word |= __shfl_xor_sync(0xffffffffu, word, distance);
      if (lane_of_word == 0) memory_.bits[at / 32] |= word;
    }
    __syncthreads();
  }

  // body(key, bit) for the keys that are in question.
  template <class Body>
  __device__ void each_key(Body body) const {
#pragma unroll 1
    for (uint32_t bits = in_question_; bits != 0; bits &= bits - 1) {
      const int bit = __ffs(static_cast<int>(bits)) - 1;
      body(key_of(values_[place_of(bit)]), 1u << bit);
    }
  }

  // Keys of the thread that are above `low` are in question.  Those that equal it, which may be many, are known then.
  __device__ void question(uint32_t low) {
    in_question_ = at_low_ = 0;
    low_key_ = low;
    int shift = 0;
#pragma unroll 1
    for (int at = first(); at < slice_.width; at += kStep, shift += kSize) {
      const Pack<T> x = *reinterpret_cast<const Pack<T>*>(values_ + at);
      uint32_t above = 0, equal = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const uint32_t key = key_of(x[i]);
        if (key > low) above |= 1u << i;
        if (key == low) equal |= 1u << i;
      }
      const int column = slice_.first_vector + at;
      if (column < slice_.begin || column > slice_.end - kSize) {
#pragma unroll 1
        for (int i = 0; i < kSize; ++i)
          if (column + i < slice_.begin || column + i >= slice_.end) {
            above &= ~(1u << i);
            equal &= ~(1u << i);
          }
      }
      in_question_ |= above << shift;
      at_low_ |= equal << shift;
    }
  }

  // From a key on that somewhat more than k are not below, as a rule, to one that less are not below.
  __device__ void rough_range(int k, uint32_t& low, uint32_t& high) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    float of_thread = -__int_as_float(0x7f800000);
#pragma unroll 1
    for (int at = first(); at < slice_.width; at += kStep) {
      const Vec<float, kSize> x = to_floats(*reinterpret_cast<const Pack<T>*>(values_ + at));
#pragma unroll
      for (int i = 0; i < kSize; ++i) of_thread = fmaxf(of_thread, x[i]);  // NaN is passed over
    }
    // Nearly the largest keys that so many lanes are not below.
    const uint32_t key = key_of_logit(of_thread) >> kShift, largest = __reduce_max_sync(0xffffffffu, key);
    const int least_lanes = min(k / exchange_.blocks() / kSelectWarps + 1, 32),
              lanes[2] = {least_lanes, least_lanes / 2};
    uint32_t bound[2], too_large[2] = {largest, largest};
    bound[0] = bound[1] = __reduce_min_sync(0xffffffffu, key);
#pragma unroll 1
    for (int i = 0; i < 6; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t middle = bound[j] + (too_large[j] - bound[j] + 1) / 2;
        if (__popc(__ballot_sync(0xffffffffu, key >= middle)) >= lanes[j]) {
          bound[j] = middle;
        } else {
          too_large[j] = middle - 1;
        }
      }
    if (lanes[1] == 0) bound[1] = largest;
    bound[0] = __reduce_min_sync(0xffffffffu, key >= bound[0] ? key : ~0u);  // a key that there is
    if (lane == 0) {
      memory_.bounds[0][thread / 32] = bound[0];
      memory_.bounds[1][thread / 32] = bound[1];
    }
    __syncthreads();
    const auto mean = [&](const uint32_t* numbers) {
      const uint32_t x = numbers[lane % kSelectWarps], least = __reduce_min_sync(0xffffffffu, x);
      const uint32_t more = lane < kSelectWarps ? x - least : 0;  // 16 of them are no integer of 32 bits
      return least + (kShift > 0 ? __reduce_add_sync(0xffffffffu, more) / kSelectWarps
                                 : __reduce_add_sync(0xffffffffu, more / kSelectWarps));
    };
    const uint32_t its_low = mean(memory_.bounds[0]);
    const uint32_t its_high =
        lanes[1] > 0 ? mean(memory_.bounds[1]) : __reduce_max_sync(0xffffffffu, memory_.bounds[1][lane % kSelectWarps]);
    const uint64_t of_lane = exchange_.number_of_lane(uint64_t{its_high} << 32 | its_low, 0xffffffffu);
    low = max(__reduce_min_sync(0xffffffffu, static_cast<uint32_t>(of_lane)), 1u);
    high = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(of_lane >> 32));
  }

  __device__ KthKey kth_key(int k, uint32_t low, uint32_t high) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, blocks = exchange_.blocks();
    uint32_t missing = static_cast<uint32_t>(k), last = kNan;  // keys from `low` to `last` are in question
    int before = 0;
    question(low);
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
      // The first bin is for the key `low` alone, which many logits may have.
      const int shift = max(32 - kRangeBits - __clz(static_cast<int>(max(high, low) - low)), 0);
      uint32_t lowest = low == low_key_ ? static_cast<uint32_t>(__popc(at_low_)) : 0;
      each_key([&](uint32_t key, uint32_t) {
        if (key == low) ++lowest;
        if (key > low && key <= last) atomicAdd(&memory_.bins[1 + min((key - low - 1) >> shift, kRangeBins - 2u)], 1u);
      });
      lowest = __reduce_add_sync(0xffffffffu, lowest);
      if (lane == 0 && lowest != 0) atomicAdd(&memory_.bins[0], lowest);
      __syncthreads();
      exchange_counts(parity);
      // Each warp goes through all bins, the last ones first.
      constexpr int kOfLane = kRangeBins / 32;
      const int first_bin = kOfLane * (31 - lane);
      using OfLane = Vec<uint32_t, kOfLane>;
      const OfLane sums = *reinterpret_cast<const OfLane*>(&memory_.sums[first_bin]);
      const OfLane sums_before = *reinterpret_cast<const OfLane*>(&memory_.sums_before[first_bin]);
      uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) own += sums[i];
      uint32_t above = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t x = __shfl_up_sync(0xffffffffu, above, distance);
        if (lane >= distance) above += x;
      }
      const uint32_t total = __shfl_sync(0xffffffffu, above, 31);
      above -= own;
      int bin = 0;
      uint32_t bin_above = 0, in_it = 0;
#pragma unroll
      for (int i = kOfLane - 1; i >= 0; --i) {
        if (above < missing && above + sums[i] >= missing) {
          bin = first_bin + i;
          bin_above = above;
          in_it = sums[i];
        }
        above += sums[i];
      }
      const bool is_here = in_it != 0;
      const uint32_t found = __ballot_sync(0xffffffffu, is_here);
      if (found == 0) {  // the rough bound is too large
        uint32_t lower = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) lower += sums_before[i];
        before += static_cast<int>(__reduce_add_sync(0xffffffffu, lower));
        missing -= total;
        high = last = low - 1;
        low = 1;
        question(low);
      } else {
        const int its_lane = __ffs(static_cast<int>(found)) - 1;
        bin = __shfl_sync(0xffffffffu, bin, its_lane);
        bin_above = __shfl_sync(0xffffffffu, bin_above, its_lane);
        in_it = __shfl_sync(0xffffffffu, in_it, its_lane);
        uint32_t lower = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) lower += first_bin + i > bin ? sums_before[i] : 0;
        before += static_cast<int>(__reduce_add_sync(0xffffffffu, lower));
        const int in_before = static_cast<int>(memory_.sums_before[bin]),
                  its_own = memory_.counts[exchange_.rank()][bin];
        missing -= bin_above;
        if (bin == 0) {
          last = low;
        } else {
          low += 1 + (static_cast<uint32_t>(bin - 1) << shift);
          if (bin != kRangeBins - 1) last = low + min(last - low, (1u << shift) - 1u);
        }
        high = last;
        if (missing == in_it) return {low - 1, 0, before + in_before};
        if (low == last) return KthKey::with_ties(low, missing, before, in_before, its_own);
        if (in_it <= kFewKeys)
          return among_few(low, last, missing, before, in_before, static_cast<int>(in_it), its_own);
      }
      exchange_.place_of_list(0);  // all blocks have read the counts
      if (thread < kRangeBins) memory_.bins[thread] = 0;
      __syncthreads();
    }
  }

  // Gives all blocks what each has in its bins, and sums of these.
  __device__ void exchange_counts(int parity) {
    const int thread = static_cast<int>(threadIdx.x), blocks = exchange_.blocks(), rank = exchange_.rank();
    constexpr int kVectors = kRangeBins / 8;
    const uint32_t barrier = shared_address(&memory_.barriers[0]);
    if (thread == 0) cluster_expect(barrier, static_cast<uint32_t>(blocks * sizeof memory_.counts[0]));
    const int first = thread % kVectors * 8, to = thread / kVectors;
    static_assert(kSelectThreads / kVectors >= kMostBlocks);
    if (to < blocks) {
      const uint4 x = *reinterpret_cast<const uint4*>(&memory_.bins[first]);
      const uint4 y = *reinterpret_cast<const uint4*>(&memory_.bins[first + 4]);
      cluster_send(cluster_address(shared_address(&memory_.counts[rank][first]), to),
                   float4{__uint_as_float(x.x | x.y << 16), __uint_as_float(x.z | x.w << 16),
                          __uint_as_float(y.x | y.y << 16), __uint_as_float(y.z | y.w << 16)},
                   cluster_address(barrier, to));
    }
    cluster_receive(barrier, parity);
    if (thread < kRangeBins) {
      uint32_t all = 0, lower = 0;
#pragma unroll 8
      for (int block = 0; block < blocks; ++block) {
        const uint32_t count = memory_.counts[block][thread];
        all += count;
        if (block < rank) lower += count;
      }
      memory_.sums[thread] = all;
      memory_.sums_before[thread] = lower;
    }
    __syncthreads();
  }

  // The key of which `missing` are not below, of those between two keys.
  __device__ KthKey among_few(uint32_t low, uint32_t last, uint32_t missing, int before, int in_before, int in_it,
                              int own) {
    const int lane = static_cast<int>(threadIdx.x) % 32, blocks = exchange_.blocks();
    const uint32_t barrier = shared_address(&memory_.barriers[1]);
    each_key([&](uint32_t key, uint32_t) {
      if (key < low || key > last) return;
      const uint32_t place =
          shared_address(&memory_.keys[in_before + static_cast<int>(atomicAdd(&memory_.num_keys, 1u))]);
#pragma unroll 1
      for (int to = 0; to < blocks; ++to)
        cluster_send(cluster_address(place, to), float2{__uint_as_float(key), 0.0f}, cluster_address(barrier, to));
    });
    if (threadIdx.x == 0) cluster_expect(barrier, static_cast<uint32_t>(in_it) * sizeof(uint64_t));
    cluster_receive(barrier);
    const uint32_t its = lane < in_it ? static_cast<uint32_t>(memory_.keys[lane]) : 0;
    uint32_t larger = 0;
#pragma unroll 1
    for (int i = 0; i < in_it; ++i) larger += __shfl_sync(0xffffffffu, its, i) > its;
    const uint32_t key = __reduce_min_sync(0xffffffffu, its != 0 && larger < missing ? its : ~0u);
    const uint32_t above = __ballot_sync(0xffffffffu, its > key), tied = __ballot_sync(0xffffffffu, its == key);
    const auto lowest = [](int n) { return n < 32 ? (1u << n) - 1u : ~0u; };
    const uint32_t of_lower = lowest(in_before), of_own = lowest(in_before + own) & ~of_lower;
    return KthKey::with_ties(key, missing - static_cast<uint32_t>(__popc(above)), before + __popc(above & of_lower),
                             __popc(tied & of_lower), __popc(tied & of_own));
  }

  RowSlice<T> slice_;
  T* values_;  // in shared memory, from the first vector on; what lies outside the row is -infinity
  RowExchange& exchange_;
  KthKeyMemory& memory_;
  uint32_t in_question_ = 0, at_low_ = 0, low_key_ = 0;  // a bit for each of the thread's values
};

}  // namespace pykv
