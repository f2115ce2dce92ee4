// A token by one warp, or by a part of one where there are few experts.  Keys stay in registers, as unsigned integers of the
// same order, so that one instruction finds the largest of a warp.
//
// A warp first looks at the largest key of each lane: the top_k-th of these is a lower bound of the keys that are chosen.  Few
// reach it, mostly: each gets a lane, by id, and a rank by how many are better, or as good and before it.  Where many do, or parts
// of a warp have a token each, the best key of all is taken out top_k times.  Both choose the same.
//
// Lanes divide into as many parts as there are groups of experts, so that a group's best are found among its own lanes:
// lane l of 2^log_width lanes of group g holds the experts g * group_size + l * kEach + j, j = 0 ... kEach - 1.  Of equal keys a
// lane finds its lowest id by itself, since its ids ascend.
//
// How a token is laid out depends on the number of experts and groups alone: its result is the same whatever else is in
// the batch.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "moe/routing.h"

namespace pykv {
namespace {

constexpr int kThreads = 128;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kLowest = 0x007fffffu;  // the key of -inf; 0: nothing is there

struct RoutingPlan {
  RoutingArgs args;
  int32_t group_size, log_width;  // of the lanes of a group
  bool in_vectors;                // a lane's logits can be loaded at once
  bool bias_in_vectors;           // there is none, or it is float and can be loaded at once
  Reporter input_ids, table;
};

// NaN counts as -inf, -0 as 0.
__device__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return v == v ? ordered : kLowest;
}
__device__ float value_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// The largest key of neighbouring lanes, and of those that have it the lowest id; given to all of them.
template <int kLanes>
__device__ void find_best(uint32_t& key, uint32_t& id) {
  if constexpr (kLanes == 32) {
    const uint32_t best = __reduce_max_sync(kAllLanes, key);
    id = __reduce_min_sync(kAllLanes, key == best ? id : kAllLanes);
    key = best;
  } else {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const uint32_t other_key = __shfl_xor_sync(kAllLanes, key, distance);
      const uint32_t other_id = __shfl_xor_sync(kAllLanes, id, distance);
      const bool other = other_key > key || (other_key == key && other_id < id);
      key = other ? other_key : key;
      id = other ? other_id : id;
    }
  }
}

// To within a unit or two of the last place.  What is no normal number is 0.
__device__ float exp_of(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * 1.4426950408889634f));
  return e;
}
__device__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

template <int kLanes>
__device__ float sum_of_lanes(float v) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(kAllLanes, v, distance);
  return v;
}

// f(pointer to T) for the element type known at run time: one branch beside many loads.
template <class F>
__device__ auto with_type(DType dtype, const void* data, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(static_cast<const half*>(data));
    case DType::kBFloat16:
      return f(static_cast<const bf16*>(data));
    default:
      return f(static_cast<const float*>(data));
  }
}

// Scores from logits.
struct Scorer {
  Scoring scoring;
  float largest, inverse_sum;  // of softmax; the second is 0 where a logit is NaN or infinite

  // Of several experts, in place: one branch for all.
  template <int kSize>
  __device__ void operator()(float (&x)[kSize]) const {
    const auto each = [&](auto&& score) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float s = score(x[j]);
        x[j] = isfinite(s) ? s : 0.0f;
      }
    };
    switch (scoring) {
      case Scoring::kSigmoid:
        return each([](float v) {
          // One step of Newton's iteration, so that sums that are equal in exact arithmetic, as sigmoid(1) + sigmoid(-1) and
          // 2 sigmoid(0), are equal here.  NaN where d is infinite, which then counts as 0.
          const float d = 1.0f + exp_of(-v), r = reciprocal(d);
          return fmaf(r, fmaf(-d, r, 1.0f), r);
        });
      case Scoring::kSoftmax:  // of exponentials
#pragma unroll
        for (int j = 0; j < kSize; ++j) x[j] = inverse_sum == 0.0f ? 0.0f : x[j] * inverse_sum;
        return;
      case Scoring::kSoftplusSqrt:
        return each([](float v) { return sqrtf(v > 20.0f ? v : log1pf(exp_of(v))); });
      default:
        return each([](float v) { return v; });
    }
  }
};

// Of softmax it leaves exponentials in `logits`.
// counts: whether this lane has any.
template <int kLanes, int kEach>
__device__ Scorer make_scorer(const RoutingArgs& a, float (&logits)[kEach], bool counts) {
  Scorer score{a.scoring, 0.0f, 1.0f};
  if (a.scoring != Scoring::kSoftmax) return score;
  float most = logits[0];  // unless it is NaN
#pragma unroll
  for (int j = 1; j < kEach; ++j) most = fmaxf(most, logits[j]);
  uint32_t largest = key_of(most), unused = 0;
  find_best<kLanes>(largest, unused);
  score.largest = value_of(largest);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum += logits[j] = exp_of(logits[j] - score.largest);
  const float inverse = reciprocal(sum_of_lanes<kLanes>(counts ? sum : 0.0f));
  score.inverse_sum = isfinite(inverse) ? inverse : 0.0f;
  return score;
}

// n - (a > b), in two instructions.
__device__ uint32_t less_if_greater(uint32_t n, uint32_t a, uint32_t b) {
  asm("{.reg .u32 rest; sub.cc.u32 rest, %2, %1; subc.u32 %0, %0, 0;}" : "+r"(n) : "r"(a), "r"(b));
  return n;
}

// Lowers the keys of groups that are not among the best.  groups: of the warp's, in shared memory.
template <int kEach>
__device__ void keep_groups(const RoutingPlan& plan, uint32_t group, uint32_t (&groups)[32], uint32_t (&keys)[kEach]) {
  const RoutingArgs& a = plan.args;
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    second = max(second, min(first, keys[j]));
    first = max(first, keys[j]);
  }
  for (int distance = (1 << plan.log_width) / 2; distance > 0; distance /= 2) {
    const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, distance);
    const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, distance);
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
  }
  const float score = value_of(first) + (a.top2_sum && second ? value_of(second) : 0.0f);
  const uint32_t score_key = first ? key_of(score) : 0;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t of_group = __shfl_sync(kAllLanes, score_key, lane << plan.log_width);
  groups[lane] = lane >> (5 - plan.log_width) ? 0 : of_group;
  __syncwarp();
  const uint32_t as_good = __match_any_sync(kAllLanes, score_key) & ((1u << (group << plan.log_width)) - 1);
  uint32_t fewer = 0;
#pragma unroll 1
  for (int i = 0; i < a.num_groups; i += 8) {
    const uint4 four = *reinterpret_cast<const uint4*>(groups + i),
                more = *reinterpret_cast<const uint4*>(groups + i + 4);
    for (const uint32_t other : {four.x, four.y, four.z, four.w, more.x, more.y, more.z, more.w})
      fewer = less_if_greater(fewer, other, score_key);
  }
  const int32_t better = static_cast<int32_t>((__popc(as_good) >> plan.log_width) - fewer);
  if (better < a.kept_groups) return;
#pragma unroll
  for (int j = 0; j < kEach; ++j) keys[j] = min(keys[j], kLowest);
}

// What a warp has in shared memory.
template <int kEach>
struct alignas(16) Candidates {
  uint32_t groups[32];       // keys, of each group
  uint32_t largest[32];      // of each lane
  uint2 all[32];             // keys that may be chosen and their places among all of the warp, in this order; then 0
  float weights[32];         // of the chosen, the best first; then 0
  float scores[32 * kEach];  // of all experts
};

// One of the best of a warp's keys.
struct Choice {
  uint32_t key, at;  // of the keys of all lanes, one lane after another
  int32_t rank;      // 0: the best
};

// Gives lanes one of the best of a warp's keys each, all of the top_k <= 32 best among them; false if too many may be.
template <int kEach>
__device__ bool choose_by_rank(const uint32_t (&keys)[kEach], int32_t top_k, Candidates<kEach>& shared, Choice& own) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) largest = max(largest, keys[j]);
  shared.largest[lane] = largest;
  shared.all[lane] = make_uint2(0, 0);
  shared.weights[lane] = 0.0f;
  __syncwarp();
  uint32_t better[4] = {};
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(shared.largest + i);
    better[0] = less_if_greater(better[0], others.x, largest);
    better[1] = less_if_greater(better[1], others.y, largest);
    better[2] = less_if_greater(better[2], others.z, largest);
    better[3] = less_if_greater(better[3], others.w, largest);
  }
  const auto lanes_better = -static_cast<int32_t>(better[0] + better[1] + better[2] + better[3]);
  const uint32_t bound = __reduce_min_sync(kAllLanes, lanes_better < top_k ? largest : kAllLanes);
  if (bound == 0) return false;
  uint32_t count = kEach;  // of this lane, that reach it
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) count = less_if_greater(count, bound, keys[j]);
  uint32_t before = 0;  // of lower lanes
#pragma unroll
  for (uint32_t bit = 1; bit <= kEach; bit *= 2)
    before += bit * __popc(__ballot_sync(kAllLanes, count & bit) & ((1u << lane) - 1));
  const uint32_t all = __shfl_sync(kAllLanes, before + count, 31);
  if (all > 32) return false;
  uint2* to = shared.all + before;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j)
    if (keys[j] >= bound) *to++ = make_uint2(keys[j], lane * kEach + j);
  __syncwarp();
  const uint2 candidate = shared.all[lane];
  uint32_t rank = __popc(__match_any_sync(kAllLanes, candidate.x) & ((1u << lane) - 1)), greater[2] = {};
  const auto count_16 = [&](int from) {
#pragma unroll
    for (int i = from; i < from + 16; i += 2) {
      const uint4 two = *reinterpret_cast<const uint4*>(shared.all + i);
      greater[0] = less_if_greater(greater[0], two.x, candidate.x);
      greater[1] = less_if_greater(greater[1], two.z, candidate.x);
    }
  };
  count_16(0);
  if (all > 16) count_16(16);
  rank -= greater[0] + greater[1];
  own = {candidate.x, candidate.y, static_cast<int32_t>(lane < all ? rank : 32)};
  return true;
}

// The sum of the weights of the best.
__device__ float sum_of_best(const float (&weights)[32], int32_t top_k) {
  const auto eight = [&](int i) {
    const float4 a = *reinterpret_cast<const float4*>(weights + i),
                 b = *reinterpret_cast<const float4*>(weights + i + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  };
  float sum = eight(0);
#pragma unroll 1
  for (int i = 8; i < top_k; i += 8) sum += eight(i);
  return sum;
}

// What is usual has instances of its own, a third of the code of that for all: one token waits for little else than instructions
// (softmax of 256 experts on an H200: 1.38 us, of which 0.67 go into a kernel that only reads and writes).
enum class Router { kAny, kSoftmax, kSigmoid };

// Whether instances for what is usual may have the call.
Router router_of(const RoutingPlan& plan) {
  const RoutingArgs& a = plan.args;
  if (a.table.data || a.image_bias.data || a.is_padding || a.ids_are_int64 || !plan.in_vectors) return Router::kAny;
  if (a.scoring == Scoring::kSigmoid) return plan.bias_in_vectors ? Router::kSigmoid : Router::kAny;
  const bool is_softmax = a.scoring == Scoring::kSoftmax && a.num_groups == 1 && !a.bias.data;
  return is_softmax && !a.finite_only && !a.zero_if_lowest ? Router::kSoftmax : Router::kAny;
}

// The same, as the compiler is to know it.
template <Router kRouter>
__device__ decltype(auto) known(const RoutingArgs& args) {
  if constexpr (kRouter == Router::kAny) {
    return (args);  // a copy would lie in memory
  } else {
    RoutingArgs a = args;
    a.table.data = a.image_bias.data = nullptr;
    a.is_padding = nullptr;
    a.ids_are_int64 = false;
    a.scoring = Scoring::kSigmoid;
    if constexpr (kRouter == Router::kSoftmax) {
      a.scoring = Scoring::kSoftmax;
      a.num_groups = 1;
      a.bias.data = nullptr;
      a.finite_only = a.zero_if_lowest = false;
    }
    return a;
  }
}

template <int kLanes, int kEach, Router kRouter>
__global__ void __launch_bounds__(kThreads, kEach <= 8 ? 8 : 1)
    routing_kernel(const __grid_constant__ RoutingPlan plan) {
  const RoutingArgs& a = known<kRouter>(plan.args);
  const uint32_t lane = threadIdx.x % kLanes;
  const int64_t asked = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool is_there = asked < a.num_tokens;
  const int64_t token = is_there ? asked : a.num_tokens - 1;  // all lanes of a warp take part
  const uint32_t width = kLanes == 32 ? 1u << plan.log_width : kLanes;
  const uint32_t group = kLanes == 32 ? lane >> plan.log_width : 0, lane_of_group = lane & (width - 1);
  const uint32_t size = group < static_cast<uint32_t>(a.num_groups) ? plan.group_size : 0;  // experts of the group
  const uint32_t before = lane_of_group * kEach, first_id = group * plan.group_size + before;

  // Where everything lies is worked out before the wait.
  const int64_t item = a.dtype == DType::kFloat32 ? 4 : 2;
  const char* row = static_cast<const char*>(a.logits.data) + token * a.logits.token_stride * item;
  // A lane without experts has the first ones, which do not count.
  const char* own_logits = row + (before < size ? first_id : 0) * item;
  const float* own_bias = static_cast<const float*>(a.bias.data) + (before < size ? first_id : 0);
  char* ids = static_cast<char*>(a.ids.data) + token * a.ids.token_stride * (a.ids_are_int64 ? 8 : 4);
  float* weights = a.weights.data + token * a.weights.token_stride;
  int32_t* source_rows = a.source_rows.data + token * a.source_rows.token_stride;
  have_ready(row);
  have_ready(own_logits);
  have_ready(own_bias);
  have_ready(ids);
  have_ready(weights);
  have_ready(source_rows);
  constexpr bool kLoadsBias = kRouter == Router::kSigmoid;
  if (kLoadsBias && a.bias.data && comes_early(64)) prefetch(own_bias);
  begin_dependent();

  // Both loads are under way before the first is used.
  Vec<float, kEach> loaded_bias;
  if constexpr (kLoadsBias) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) loaded_bias[j] = 0.0f;
    if (a.bias.data) loaded_bias = *reinterpret_cast<const Vec<float, kEach>*>(own_bias);
  }
  float logits[kEach];  // then scores
  with_type(a.dtype, row, [&](auto typed_row) {
    using T = std::remove_cvref_t<decltype(*typed_row)>;
    if (kRouter != Router::kAny || plan.in_vectors) {
      const auto loaded = *reinterpret_cast<const Vec<T, kEach>*>(own_logits);
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j) logits[j] = to_float(loaded[j]);
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j)
        logits[j] = before + j < size ? to_float(typed_row[(first_id + j) * a.logits.stride]) : -INFINITY;
    }
  });
  const Scorer score = make_scorer<kLanes>(a, logits, before < size);
  [[maybe_unused]] const auto weight_of = [&](int64_t id) {
    float s[1] = {with_type(a.dtype, row, [&](auto data) { return to_float(data[id * a.logits.stride]); })};
    if (a.scoring == Scoring::kSoftmax) s[0] = exp_of(s[0] - score.largest);
    score(s);
    return s[0] + 0.0f;  // as value_of has it
  };
  const bool is_padding = a.is_padding && a.is_padding[token * a.is_padding_stride];

  const bool is_of_image = a.is_of_image(token);
  const bool is_hashed = a.table.data != nullptr && !is_of_image;
  const bool chooses = a.table.data == nullptr || __any_sync(kAllLanes, !is_hashed);  // a token of this warp
  uint32_t keys[kEach];
  const char* table_row = nullptr;
  if (is_hashed) {
    const int64_t input_id = a.input_ids[token];
    const bool is_known = input_id >= 0 && input_id < a.vocab_size;
    if (!is_known && !is_padding && is_there && lane == 0) plan.input_ids(input_id, a.vocab_size);
    if (is_known)
      table_row = static_cast<const char*>(a.table.data) + input_id * a.table.token_stride * (a.table_is_int64 ? 8 : 4);
  }
  __shared__ Candidates<kLanes == 32 ? kEach : 1> of_warps[kThreads / 32];
  auto& candidates = of_warps[threadIdx.x / 32];
  if (chooses) {
    uint32_t not_finite[(kEach + 31) / 32] = {};  // a bit for each expert
    if (a.finite_only) {
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j)
        if (!isfinite(logits[j])) not_finite[j / 32] |= 1u << j % 32;
    }
    // Softmax as it is usual chooses among exponentials, so that nothing waits for their sum.
    if constexpr (kRouter != Router::kSoftmax) score(logits);
    float biased[kEach];
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) biased[j] = logits[j];
    if constexpr (kLoadsBias) {
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j) biased[j] += loaded_bias[j];
    } else {
      const ExpertBias& bias = is_of_image ? a.image_bias : a.bias;
      if (bias.data)
        with_type(bias.dtype, bias.data, [&](auto numbers) {
#pragma unroll
          for (uint32_t j = 0; j < kEach; ++j)
            if (before + j < size) biased[j] += to_float(numbers[(first_id + j) * bias.stride]);
        });
    }
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      uint32_t key = 0;
      if constexpr (kRouter == Router::kSoftmax)
        key = __float_as_uint(logits[j]) | 0x80000000u;  // not negative; NaN if all have the weight 0
      else
        key = not_finite[j / 32] >> j % 32 & 1 ? kLowest : key_of(biased[j]);
      keys[j] = before + (kRouter == Router::kAny ? j : 0) < size ? key : 0;
    }
    if constexpr (kLanes == 32)
      if (a.num_groups > 1) keep_groups(plan, group, candidates.groups, keys);
  }

  // Where softmax has no sum, all keys are alike: the first experts are chosen.
  const bool is_none = kRouter == Router::kSoftmax && score.inverse_sum == 0.0f;
  const auto put_id = [&](int32_t to, int64_t id) {
    if (a.ids_are_int64)
      reinterpret_cast<int64_t*>(ids)[to * a.ids.stride] = id;
    else
      reinterpret_cast<int32_t*>(ids)[to * a.ids.stride] = static_cast<int32_t>(id);
    if (a.source_rows.data) source_rows[to * a.source_rows.stride] = static_cast<int32_t>(to * a.num_tokens + token);
  };

  if constexpr (kLanes == 32) {
    Choice own;
    if constexpr (kRouter != Router::kSoftmax) {  // there a key says it all
#pragma unroll
      for (int j = 0; j < kEach; j += 4)
        *reinterpret_cast<float4*>(candidates.scores + lane * kEach + j) =
            make_float4(logits[j], logits[j + 1], logits[j + 2], logits[j + 3]);
    }
    if (!is_hashed && a.top_k <= 32 && choose_by_rank(keys, a.top_k, candidates, own)) {
      float weight = 0.0f;
      if constexpr (kRouter == Router::kSoftmax)
        weight = is_none ? 0.0f : value_of(own.key) * score.inverse_sum;
      else if (!is_padding && !(a.zero_if_lowest && own.key == kLowest))
        weight = candidates.scores[own.at] + 0.0f;  // as value_of has it
      if (own.rank < a.top_k) candidates.weights[own.rank] = weight;
      __syncwarp();
      const float sum = sum_of_best(candidates.weights, a.top_k) + a.epsilon;
      if (!is_there || own.rank >= a.top_k) return;
      const uint32_t of_lane = own.at / kEach;
      const uint32_t id =
          (of_lane >> plan.log_width) * plan.group_size + (of_lane & (width - 1)) * kEach + own.at % kEach;
      put_id(own.rank, is_padding ? -1 : is_none ? own.rank : static_cast<int32_t>(id));
      weights[own.rank * a.weights.stride] = weight / (a.renormalize && sum != 0 ? sum : 1.0f) * a.factor;
      return;
    }
  }

  float sum = 0, weight = 0;
  for (int32_t from = 0; from < a.top_k; from += kLanes) {
    const int32_t mine = from + static_cast<int32_t>(lane);  // this lane's choice of these
    int64_t id = -1;
    uint32_t chosen = 0;  // its key
    if (is_hashed) {
      if (table_row && mine < a.top_k && !is_padding) {
        const int64_t at = mine * a.table.stride;
        id = a.table_is_int64 ? reinterpret_cast<const int64_t*>(table_row)[at]
                              : reinterpret_cast<const int32_t*>(table_row)[at];
        if (id < 0 || id >= a.num_experts) {
          if (is_there) plan.table(id, a.num_experts);
          id = -1;
        }
      }
    }
    if (chooses) {
      const int32_t end = min(from + kLanes, a.top_k);
#pragma unroll 1
      for (int32_t choice = from; choice < end; ++choice) {
        uint32_t best = 0, best_id = kAllLanes;
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j) {
          if (keys[j] > best) {
            best = keys[j];
            best_id = first_id + j;
          }
        }
        find_best<kLanes>(best, best_id);
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j)
          if (first_id + j == best_id) keys[j] = 0;
        if (choice == mine && !is_hashed && !is_padding) {
          id = is_none ? static_cast<uint32_t>(choice) : best_id;
          chosen = best;
        }
      }
    }
    weight = 0.0f;
    if constexpr (kRouter == Router::kSoftmax) {
      if (mine < a.top_k && !is_none) weight = value_of(chosen) * score.inverse_sum;
    } else if (mine < a.top_k && id >= 0 && !(a.zero_if_lowest && chosen == kLowest)) {
      weight = weight_of(id);
    }
    sum += weight;
    if (!is_there || mine >= a.top_k) continue;
    put_id(mine, id);
    if (a.top_k > kLanes) weights[mine * a.weights.stride] = weight;  // more than one a lane: read again below
  }

  sum = sum_of_lanes<kLanes>(sum) + a.epsilon;
  const float divisor = a.renormalize && sum != 0 ? sum : 1.0f;
  if (!is_there) return;
  for (int32_t mine = static_cast<int32_t>(lane); mine < a.top_k; mine += kLanes) {
    float& w = weights[mine * a.weights.stride];
    w = (a.top_k > kLanes ? w : weight) / divisor * a.factor;
  }
}

template <int kLanes, int kEach>
void launch_routing(RoutingPlan plan, const Launch& launch) {
  constexpr int64_t kTokens = kThreads / kLanes;  // of a block
  const int64_t blocks = (plan.args.num_tokens + kTokens - 1) / kTokens;
  if (blocks > 0x7fffffff) fail(PYKV_NOT_IMPLEMENTED, "2^31 blocks of tokens are not supported");
  const TokenArray<const void>& logits = plan.args.logits;
  const int64_t item = static_cast<int64_t>(size_of(plan.args.dtype));
  plan.in_vectors =
      logits.stride == 1 && plan.group_size % kEach == 0 &&
      is_aligned(std::min<int64_t>(kEach * item, kAccessBytes), logits.data, {logits.token_stride * item});
  const ExpertBias& bias = plan.args.bias;
  plan.bias_in_vectors = !bias.data || (bias.dtype == DType::kFloat32 && bias.stride == 1 &&
                                        is_aligned(std::min<int64_t>(kEach * 4, kAccessBytes), bias.data));
  const auto start = [&](auto kernel) {
    launch_dependent(kernel, static_cast<uint32_t>(blocks), kThreads, launch, "routing", plan);
  };
  switch (router_of(plan)) {
    case Router::kSoftmax:
      return start(routing_kernel<kLanes, kEach, Router::kSoftmax>);
    case Router::kSigmoid:
      return start(routing_kernel<kLanes, kEach, Router::kSigmoid>);
    default:
      start(routing_kernel<kLanes, kEach, Router::kAny>);
  }
}

}  // namespace

void routing_cuda(const RoutingArgs& args, const Launch& launch) {
  RoutingPlan plan{args,
                   args.num_experts / args.num_groups,
                   5,
                   false,
                   false,
                   launch.reporter(args.report_input_ids),
                   launch.reporter(args.report_table)};
  if (args.num_groups == 1) {
    if (args.num_experts <= 8) return launch_routing<2, 4>(plan, launch);
    if (args.num_experts <= 16) return launch_routing<4, 4>(plan, launch);
    if (args.num_experts <= 32) return launch_routing<8, 4>(plan, launch);
    if (args.num_experts <= 64) return launch_routing<16, 4>(plan, launch);
  }
  plan.log_width = 5 - std::bit_width(static_cast<uint32_t>(args.num_groups) - 1);
  const int32_t each = (plan.group_size + (1 << plan.log_width) - 1) >> plan.log_width;
  if (each <= 4) return launch_routing<32, 4>(plan, launch);
  if (each <= 8) return launch_routing<32, 8>(plan, launch);
  if (each <= 16) return launch_routing<32, 16>(plan, launch);
  if (each <= 32) return launch_routing<32, 32>(plan, launch);
  launch_routing<32, 64>(plan, launch);  // of 1024 experts in 17 groups or so
}

}  // namespace pykv
