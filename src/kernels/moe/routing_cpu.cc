// Twin of routing.cu: a token after another.  Scores are computed in vectors; a list of the best k so far is kept, which few
// experts enter.
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "moe/routing.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kScoresPerTask = 4096;  // fewer are not worth another thread
constexpr float kLowest = -std::numeric_limits<float>::infinity();

void load_row(float* to, DType dtype, const void* data, int64_t first, int64_t stride, int64_t count) {
  dispatch<float, f16, bf16>(dtype, [&]<class T> {
    const T* from = static_cast<const T*>(data) + first;
    if (stride == 1)
      for (int64_t i = 0; i < count; i += kWidth) store(to + i, load(from + i, count - i), count - i);
    else
      for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i * stride]);
  });
}

// 1 + e^x < 1 + 2^-23 x: log(1 + e) as log(u) * e / (u - 1), u the rounded sum.
Floats softplus(Floats x) {
  const Floats e = exp(x), u = 1.0f + e, more = u - 1.0f;
  const Floats result = select(more == 0.0f, e, log(u) * (e / more));
  return select(x > 20.0f, x, result);
}

template <class F>
void each(float* scores, int64_t count, F&& f) {
  for (int64_t i = 0; i < count; i += kWidth) store(scores + i, f(load(scores + i, count - i)), count - i);
}

// As load(), with -inf in the lanes that are not there.
Floats load_lowest(const float* from, int64_t count) {
  if (count >= kWidth) return load(from);
  Floats v = splat(kLowest);
  for (int64_t i = 0; i < count; ++i) v[i] = from[i];
  return v;
}

// From logits to scores, in place.
void score_row(float* x, int64_t count, Scoring scoring) {
  switch (scoring) {
    case Scoring::kNone:
      break;
    case Scoring::kSigmoid:
      each(x, count, [](Floats v) { return 1.0f / (1.0f + exp(-v)); });
      break;
    case Scoring::kSoftplusSqrt:
      each(x, count, [](Floats v) { return sqrt(softplus(v)); });
      break;
    case Scoring::kSoftmax: {
      Floats most = splat(kLowest), total{};
      for (int64_t i = 0; i < count; i += kWidth) most = max(load_lowest(x + i, count - i), most);
      const float largest = max(most);
      each(x, count, [&](Floats v) { return exp(v - largest); });
      for (int64_t i = 0; i < count; i += kWidth) total += load(x + i, count - i);
      const float inverse = 1.0f / sum(total);
      each(x, count, [&](Floats v) { return v * inverse; });
      break;
    }
  }
  each(x, count, [](Floats v) { return select(v - v == 0.0f, v, Floats{}); });
}

// The largest keys so far, the first of equal ones first.
class Best {
 public:
  explicit Best(int64_t most) : keys_(most), ids_(most) {}

  void clear() { count_ = 0; }
  void offer(float key, int32_t id) {
    const auto most = static_cast<int64_t>(keys_.size());
    if (count_ == most && !(key > keys_[most - 1])) return;
    int64_t at = count_ < most ? count_++ : most - 1;
    for (; at > 0 && key > keys_[at - 1]; --at) {
      keys_[at] = keys_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    keys_[at] = key;
    ids_[at] = id;
  }
  // Of experts 0 ... count - 1.
  void offer_all(const float* keys, int64_t count) {
    const auto most = static_cast<int64_t>(keys_.size());
    for (int64_t i = 0; i < count; i += kWidth) {
      if (count_ == most && !(max(load_lowest(keys + i, count - i)) > keys_[most - 1])) continue;
      for (int64_t e = i; e < count && e < i + kWidth; ++e) offer(keys[e], static_cast<int32_t>(e));
    }
  }
  float key(int64_t i) const { return keys_[i]; }
  int32_t id(int64_t i) const { return ids_[i]; }

 private:
  std::vector<float> keys_;
  std::vector<int32_t> ids_;
  int64_t count_ = 0;
};

class Router {
 public:
  Router(const RoutingArgs& a, const Launch& launch)
      : a_(a),
        launch_(launch),
        scores_(a.num_experts),
        keys_(a.num_experts),
        bias_(a.bias.data ? a.num_experts : 0),
        image_bias_(a.image_bias.data ? a.num_experts : 0),
        chosen_(a.top_k),
        groups_(a.kept_groups),
        ids_(a.top_k),
        weights_(a.top_k) {
    load_bias(bias_, a.bias);
    load_bias(image_bias_, a.image_bias);
  }

  void route(int64_t token) {
    if (a_.is_padding && a_.is_padding[token * a_.is_padding_stride]) {
      for (int64_t j = 0; j < a_.top_k; ++j) ids_[j] = -1, weights_[j] = 0;
    } else {
      load_row(scores_.data(), a_.dtype, a_.logits.data, token * a_.logits.token_stride, a_.logits.stride,
               a_.num_experts);
      if (a_.finite_only) find_finite();
      score_row(scores_.data(), a_.num_experts, a_.scoring);
      const bool is_of_image = a_.is_of_image(token);
      if (a_.table.data && !is_of_image)
        look_up(token);
      else
        choose(is_of_image ? image_bias_ : bias_);
      weigh();
    }
    put(token);
  }

 private:
  // Leaves in keys_ 0 for a logit that is finite, else -inf.
  void find_finite() {
    for (int64_t e = 0; e < a_.num_experts; ++e) keys_[e] = scores_[e] - scores_[e] == 0 ? 0.0f : kLowest;
  }

  static void load_bias(std::vector<float>& to, const ExpertBias& from) {
    if (from.data) load_row(to.data(), from.dtype, from.data, 0, from.stride, static_cast<int64_t>(to.size()));
  }

  void choose(const std::vector<float>& bias) {
    for (int64_t i = 0; i < a_.num_experts; i += kWidth) {
      const int64_t left = a_.num_experts - i;
      Floats key = load(&scores_[i], left);
      if (!bias.empty()) key += load(&bias[i], left);
      if (a_.finite_only) key += load(&keys_[i], left);
      store(&keys_[i], select(key == key, key, splat(kLowest)), left);
    }
    if (a_.num_groups > 1) keep_groups();
    chosen_.clear();
    chosen_.offer_all(keys_.data(), a_.num_experts);
    for (int64_t j = 0; j < a_.top_k; ++j) {
      ids_[j] = chosen_.id(j);
      weights_[j] = a_.zero_if_lowest && chosen_.key(j) == kLowest ? 0.0f : scores_[ids_[j]];
    }
  }

  void keep_groups() {
    const int64_t size = a_.num_experts / a_.num_groups;
    groups_.clear();
    for (int32_t g = 0; g < a_.num_groups; ++g) {
      float first = kLowest, second = kLowest;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        second = keys_[e] > first ? first : keys_[e] > second ? keys_[e] : second;
        first = keys_[e] > first ? keys_[e] : first;
      }
      const float score = a_.top2_sum && size > 1 ? first + second : first;
      groups_.offer(score == score ? score : kLowest, g);
    }
    bool kept[kMaxExpertGroups] = {};
    for (int64_t i = 0; i < a_.kept_groups; ++i) kept[groups_.id(i)] = true;
    for (int64_t e = 0; e < a_.num_experts; ++e)
      if (!kept[e / size]) keys_[e] = kLowest;
  }

  void look_up(int64_t token) {
    const int64_t row = a_.input_ids[token];
    const bool is_there = row >= 0 && row < a_.vocab_size;
    if (!is_there) launch_.reporter(a_.report_input_ids)(row, a_.vocab_size);
    for (int64_t j = 0; j < a_.top_k; ++j) {
      int64_t id = -1;
      if (is_there) {
        const int64_t at = a_.table.at(row, j);
        id = a_.table_is_int64 ? static_cast<const int64_t*>(a_.table.data)[at]
                               : static_cast<const int32_t*>(a_.table.data)[at];
        if (id < 0 || id >= a_.num_experts) {
          launch_.reporter(a_.report_table)(id, a_.num_experts);
          id = -1;
        }
      }
      ids_[j] = static_cast<int32_t>(id);
      weights_[j] = id < 0 ? 0.0f : scores_[id];
    }
  }

  void weigh() {
    float sum = a_.epsilon;
    for (const float w : weights_) sum += w;
    const float divisor = a_.renormalize && sum != 0 ? sum : 1.0f;
    for (float& w : weights_) w = w / divisor * a_.factor;
  }

  void put(int64_t token) {
    for (int64_t j = 0; j < a_.top_k; ++j) {
      a_.weights.data[a_.weights.at(token, j)] = weights_[j];
      const int64_t at = a_.ids.at(token, j);
      if (a_.ids_are_int64)
        static_cast<int64_t*>(a_.ids.data)[at] = ids_[j];
      else
        static_cast<int32_t*>(a_.ids.data)[at] = ids_[j];
      if (a_.source_rows.data)
        a_.source_rows.data[a_.source_rows.at(token, j)] = static_cast<int32_t>(j * a_.num_tokens + token);
    }
  }

  const RoutingArgs& a_;
  const Launch& launch_;
  std::vector<float> scores_, keys_, bias_, image_bias_;
  Best chosen_, groups_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace

void routing_cpu(const RoutingArgs& args, const Launch& launch) {
  parallel_for(args.num_tokens, kScoresPerTask / args.num_experts + 1, [&](int64_t begin, int64_t end) {
    Router router(args, launch);
    for (int64_t token = begin; token < end; ++token) router.route(token);
  });
}

}  // namespace pykv::PYKV_ISA
