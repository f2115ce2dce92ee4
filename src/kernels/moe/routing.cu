// A token by one warp, or by a part of one where there are few experts.  Keys stay in registers, as unsigned integers of the
// same order, so that one instruction finds the largest of a warp.
//
// A warp first looks at the largest key of each lane: the top_k-th of these is a lower bound of the keys that are chosen.  Few
// reach it, mostly: each gets a lane, and a place by how many are better.  Where many do, or parts of a warp have a token each, the
// best key of all is taken out top_k times.  Both choose the same.
//
// Lanes divide into as many parts as there are groups of experts, so that a group's best are found among its own lanes:
// lane l of `width` lanes of group g holds the experts g * group_size + l * kEach + j, j = 0 ... kEach - 1.  Of equal keys a
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
  int32_t group_size, width;
  bool in_vectors;  // a lane's logits can be loaded at once
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
        return each([](float v) { return 1.0f / (1.0f + __expf(-v)); });
      case Scoring::kSoftmax:  // of exponentials
#pragma unroll
        for (int j = 0; j < kSize; ++j) x[j] = inverse_sum == 0.0f ? 0.0f : x[j] * inverse_sum;
        return;
      case Scoring::kSoftplusSqrt:
        return each([](float v) { return sqrtf(v > 20.0f ? v : log1pf(__expf(v))); });
      default:
        return each([](float v) { return v; });
    }
  }
};

// Of softmax it leaves exponentials in `logits`.
template <int kLanes, int kEach>
__device__ Scorer make_scorer(const RoutingArgs& a, float (&logits)[kEach]) {
  Scorer score{a.scoring, 0.0f, 1.0f};
  if (a.scoring != Scoring::kSoftmax) return score;
  uint32_t largest = 0, unused = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) largest = max(largest, key_of(logits[j]));
  find_best<kLanes>(largest, unused);
  score.largest = value_of(largest);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    sum += logits[j] = __expf(logits[j] - score.largest);  // 0 of those that are not there
  const float inverse = 1.0f / sum_of_lanes<kLanes>(sum);
  score.inverse_sum = isfinite(inverse) ? inverse : 0.0f;
  return score;
}

// Lowers the keys of groups that are not among the best.
template <int kEach>
__device__ void keep_groups(const RoutingPlan& plan, uint32_t group, uint32_t (&keys)[kEach]) {
  const RoutingArgs& a = plan.args;
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    second = max(second, min(first, keys[j]));
    first = max(first, keys[j]);
  }
  for (int distance = plan.width / 2; distance > 0; distance /= 2) {
    const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, distance);
    const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, distance);
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
  }
  const float score = value_of(first) + (a.top2_sum && second ? value_of(second) : 0.0f);
  uint32_t score_key = first ? key_of(score) : 0;
  bool is_kept = false;
  for (int i = 0; i < a.kept_groups; ++i) {
    uint32_t key = score_key, best = group;
    find_best<32>(key, best);
    if (best == group) {
      is_kept = true;
      score_key = 0;
    }
  }
  if (is_kept) return;
#pragma unroll
  for (int j = 0; j < kEach; ++j) keys[j] = min(keys[j], kLowest);
}

// A key and its expert as one number, of which the largest is the best: of equal keys the one of the lower id.
struct Choice {
  uint64_t packed;

  Choice() = default;
  __device__ Choice(uint32_t key, uint32_t id) : packed(static_cast<uint64_t>(key) << 32 | ~id) {}
  __device__ uint32_t key() const { return static_cast<uint32_t>(packed >> 32); }
  __device__ uint32_t id() const { return ~static_cast<uint32_t>(packed); }
};

// What a warp has in shared memory: those that may be chosen, and then those that are.
struct alignas(16) Candidates {
  uint64_t all[32], best[32];
  uint32_t largest[32];  // of each lane
};

// Gives lane i the i-th best of a warp's keys, i < top_k <= 32; false if too many may be among them.
template <int kEach>
__device__ bool choose_by_rank(const uint32_t (&keys)[kEach], uint32_t first_id, int32_t top_k, Candidates& shared,
                               Choice& chosen) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) largest = max(largest, keys[j]);
  shared.largest[lane] = largest;
  __syncwarp();
  int32_t better = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(shared.largest + i);
    better += (others.x > largest) + (others.y > largest) + (others.z > largest) + (others.w > largest);
  }
  const uint32_t bound = __reduce_min_sync(kAllLanes, better < top_k ? largest : kAllLanes);
  if (bound == 0) return false;
  uint32_t reach[kEach], count = 0;  // lanes whose j-th key reaches it
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    reach[j] = __ballot_sync(kAllLanes, keys[j] >= bound);
    count += __popc(reach[j]);
  }
  if (count > 32) return false;
  const uint32_t lower = (1u << lane) - 1;
  uint32_t before = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    if (keys[j] >= bound) shared.all[before + __popc(reach[j] & lower)] = Choice(keys[j], first_id + j).packed;
    before += __popc(reach[j]);
  }
  if (lane >= count) shared.all[lane] = 0;
  __syncwarp();
  const uint64_t own = shared.all[lane];
  uint32_t rank = 0;  // how many are better
  for (uint32_t i = 0; i < count; i += 4) {
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) rank += shared.all[i + e] > own;
  }
  if (lane < count) shared.best[rank] = own;
  __syncwarp();
  chosen.packed = shared.best[lane];
  return true;
}

// What is usual has instances of its own, a third of the code of that for all: one token waits for little else than instructions
// (softmax of 256 experts on an H200 2.81 us with that for all).
enum class Router { kAny, kSoftmax, kSigmoid };

// Whether instances for what is usual may have the call.
Router router_of(const RoutingPlan& plan) {
  const RoutingArgs& a = plan.args;
  if (a.table.data || a.image_bias.data || a.is_padding || a.ids_are_int64 || !plan.in_vectors) return Router::kAny;
  if (a.scoring == Scoring::kSigmoid) return Router::kSigmoid;
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
  begin_dependent();
  const uint32_t lane = threadIdx.x % kLanes;
  const int64_t asked = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool is_there = asked < a.num_tokens;
  const int64_t token = is_there ? asked : a.num_tokens - 1;  // all lanes of a warp take part
  const uint32_t width = kLanes == 32 ? plan.width : kLanes;
  const uint32_t group = lane / width, lane_of_group = lane % width;
  const uint32_t size = group < static_cast<uint32_t>(a.num_groups) ? plan.group_size : 0;  // experts of the group
  const uint32_t before = lane_of_group * kEach, first_id = group * plan.group_size + before;

  float logits[kEach];  // then scores
  with_type(a.dtype, a.logits.data, [&](auto data) {
    using T = std::remove_cvref_t<decltype(*data)>;
    const T* const row = data + token * a.logits.token_stride;
    if (kRouter != Router::kAny || plan.in_vectors) {
      Vec<T, kEach> loaded;
      if (before < size) loaded = *reinterpret_cast<const Vec<T, kEach>*>(row + first_id);
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j) logits[j] = before < size ? to_float(loaded[j]) : -INFINITY;
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j)
        logits[j] = before + j < size ? to_float(row[(first_id + j) * a.logits.stride]) : -INFINITY;
    }
  });
  const Scorer score = make_scorer<kLanes>(a, logits);
  const auto weight_of = [&](int64_t id) {
    float s[1] = {with_type(a.dtype, a.logits.data, [&](auto data) { return to_float(data[a.logits.at(token, id)]); })};
    if (a.scoring == Scoring::kSoftmax) s[0] = __expf(s[0] - score.largest);
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
    const int64_t row = a.input_ids[token];
    const bool is_known = row >= 0 && row < a.vocab_size;
    if (!is_known && !is_padding && is_there && lane == 0) plan.input_ids(row, a.vocab_size);
    if (is_known)
      table_row = static_cast<const char*>(a.table.data) + row * a.table.token_stride * (a.table_is_int64 ? 8 : 4);
  }
  if (chooses) {
    uint32_t not_finite[(kEach + 31) / 32] = {};  // a bit for each expert
    if (a.finite_only) {
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j)
        if (!isfinite(logits[j])) not_finite[j / 32] |= 1u << j % 32;
    }
    score(logits);
    const ExpertBias& bias = is_of_image ? a.image_bias : a.bias;
    if (bias.data)
      with_type(bias.dtype, bias.data, [&](auto numbers) {
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j)
          if (before + j < size) logits[j] += to_float(numbers[(first_id + j) * bias.stride]);
      });
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      const uint32_t key = not_finite[j / 32] >> j % 32 & 1 ? kLowest : key_of(logits[j]);
      keys[j] = before + j < size ? key : 0;
    }
    if constexpr (kLanes == 32)
      if (a.num_groups > 1) keep_groups(plan, group, keys);
  }

  bool is_ranked = false;
  Choice ranked;
  if constexpr (kLanes == 32) {
    __shared__ Candidates candidates[kThreads / 32];
    if (!is_hashed && a.top_k <= 32)
      is_ranked = choose_by_rank(keys, first_id, a.top_k, candidates[threadIdx.x / 32], ranked);
  }

  float sum = 0, weight = 0;
  for (int32_t from = 0; from < a.top_k; from += kLanes) {
    const int32_t mine = from + static_cast<int32_t>(lane);  // this lane's choice of these
    int64_t id = -1;
    bool is_lowest = false;
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
    if (is_ranked) {
      if (mine < a.top_k && !is_padding) id = ranked.id();
      is_lowest = ranked.key() == kLowest;
    } else if (chooses) {
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
          id = best_id;
          is_lowest = best == kLowest;
        }
      }
    }
    weight = 0.0f;
    if (mine < a.top_k && id >= 0 && !(a.zero_if_lowest && is_lowest))
      weight = is_ranked && !a.bias.data && !is_of_image ? value_of(ranked.key()) : weight_of(id);
    sum += weight;
    if (!is_there || mine >= a.top_k) continue;
    if (a.ids_are_int64)
      static_cast<int64_t*>(a.ids.data)[a.ids.at(token, mine)] = id;
    else
      static_cast<int32_t*>(a.ids.data)[a.ids.at(token, mine)] = static_cast<int32_t>(id);
    if (a.source_rows.data)
      a.source_rows.data[a.source_rows.at(token, mine)] = static_cast<int32_t>(mine * a.num_tokens + token);
    if (a.top_k > kLanes) a.weights.data[a.weights.at(token, mine)] = weight;  // more than one a lane: read again below
  }

  sum = sum_of_lanes<kLanes>(sum) + a.epsilon;
  const float divisor = a.renormalize && sum != 0 ? sum : 1.0f;
  if (!is_there) return;
  for (int32_t mine = static_cast<int32_t>(lane); mine < a.top_k; mine += kLanes) {
    float& w = a.weights.data[a.weights.at(token, mine)];
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
  RoutingPlan plan{args,  args.num_experts / args.num_groups,     32,
                   false, launch.reporter(args.report_input_ids), launch.reporter(args.report_table)};
  if (args.num_groups == 1) {
    if (args.num_experts <= 8) return launch_routing<2, 4>(plan, launch);
    if (args.num_experts <= 16) return launch_routing<4, 4>(plan, launch);
    if (args.num_experts <= 32) return launch_routing<8, 4>(plan, launch);
    if (args.num_experts <= 64) return launch_routing<16, 4>(plan, launch);
  }
  plan.width = 32 / static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(args.num_groups)));
  const int32_t each = (plan.group_size + plan.width - 1) / plan.width;
  if (each <= 4) return launch_routing<32, 4>(plan, launch);
  if (each <= 8) return launch_routing<32, 8>(plan, launch);
  if (each <= 16) return launch_routing<32, 16>(plan, launch);
  if (each <= 32) return launch_routing<32, 32>(plan, launch);
  launch_routing<32, 64>(plan, launch);  // of 1024 experts in 17 groups or so
}

}  // namespace pykv
