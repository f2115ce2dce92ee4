// Operations called from several threads at once, while another one changes how many threads each may use: for a build
// with ThreadSanitizer (ci.sh).  Threads share what they read, and own what they write.  Prints "ok", or how many calls
// did not return what they must.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <pykv/kernels.hpp>
#include <thread>
#include <vector>

namespace {

constexpr int kCallers = 6;
constexpr int64_t kTokens = 48, kWidth = 512, kBlocks = 32, kBlockSize = 16, kKvHeads = 2, kHeads = 4, kHeadSize = 32;
constexpr size_t kCache = kBlocks * kBlockSize * kKvHeads * kHeadSize;

struct Inputs {
  std::vector<float> x = std::vector<float>(kTokens * kWidth, 0.5f), keys = std::vector<float>(kCache, 0.25f);
  std::vector<float> query = std::vector<float>(8 * kHeads * kHeadSize, 0.5f);
  std::vector<float> tokens = std::vector<float>(kTokens * kKvHeads * kHeadSize, 1.0f);
  std::vector<int64_t> tables = std::vector<int64_t>(8 * 4), lens = std::vector<int64_t>(8, 60);
};

// Whether a call of this kind does what it must.
bool is_right(int kind, const Inputs& in, std::vector<float>& out, std::vector<float>& keys,
              std::vector<float>& values) {
  const pykv::ConstTensor x(in.x.data(), {kTokens, kWidth});
  switch (kind) {
    case 0:
      return pykv_gelu_new(pykv::Tensor(out.data(), {kTokens, kWidth}), x, nullptr) == PYKV_OK;
    case 1:
      return pykv_rms_norm(pykv::Tensor(out.data(), {kTokens, kWidth}), x, nullptr, 1e-6, nullptr) == PYKV_OK;
    case 2:
      return pykv_silu_and_mul(pykv::Tensor(out.data(), {kTokens, kWidth / 2}), x, nullptr) == PYKV_OK;
    case 3: {  // refused: each thread has its own message
      const int64_t width = kWidth - 1;
      return pykv_rms_norm(pykv::Tensor(out.data(), {kTokens, width}), x, nullptr, 1e-6, nullptr) == PYKV_VALUE_ERROR &&
             pykv_last_error()[0] != '\0';
    }
    case 4: {
      const pykv::ConstTensor cache(in.keys.data(), {kBlocks, kBlockSize, kKvHeads, kHeadSize});
      return pykv_paged_attention(pykv::Tensor(out.data(), {8, kHeads, kHeadSize}),
                                  pykv::ConstTensor(in.query.data(), {8, kHeads, kHeadSize}), cache, cache,
                                  pykv::ConstTensor(in.tables.data(), {8, 4}), pykv::ConstTensor(in.lens.data(), {8}),
                                  nullptr, nullptr) == PYKV_OK;
    }
    case 5: {  // threads put together what is largest
      std::vector<uint8_t> codes(kTokens * kWidth);
      float scale = 0.0f;
      return pykv_dynamic_scaled_fp8_quant(pykv::Tensor(codes.data(), {kTokens, kWidth}), x, pykv::Tensor(&scale, {1}),
                                           nullptr) == PYKV_OK &&
             scale == 0.5f / 448.0f;
    }
    case 6: {  // the first one of equal logits, of each row
      std::vector<int32_t> tokens(kTokens, -2);
      const float temperature = 0.0f;
      const bool done =
          pykv_sample(pykv::Tensor(tokens.data(), {kTokens}), x, nullptr, nullptr, pykv::ConstTensor(&temperature, {1}),
                      nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0,
                      nullptr, nullptr, nullptr) == PYKV_OK;
      return done && tokens[0] == 0 && tokens[kTokens - 1] == 0;
    }
    case 7: {
      std::vector<float> weights(kTokens * 2);
      std::vector<int32_t> ids(kTokens * 2, -1);
      return pykv_topk_softmax(pykv::Tensor(weights.data(), {kTokens, 2}), pykv::Tensor(ids.data(), {kTokens, 2}),
                               nullptr, x, false, nullptr, nullptr, nullptr) == PYKV_OK &&
             ids[1] == 1 && weights[1] == 1.0f / kWidth;
    }
    default: {  // one id is out of range: the others are used, and it is reported
      std::vector<int64_t> slots(kTokens);
      for (int64_t i = 0; i < kTokens; ++i) slots[i] = i == 5 ? int64_t{1} << 40 : i;
      const pykv::ConstTensor tokens(in.tokens.data(), {kTokens, kKvHeads, kHeadSize});
      return pykv_reshape_and_cache_flash(
                 tokens, tokens, pykv::Tensor(keys.data(), {kBlocks, kBlockSize, kKvHeads, kHeadSize}),
                 pykv::Tensor(values.data(), {kBlocks, kBlockSize, kKvHeads, kHeadSize}),
                 pykv::ConstTensor(slots.data(), {kTokens}), "auto", nullptr, nullptr, nullptr) == PYKV_VALUE_ERROR;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  Inputs in;
  for (size_t i = 0; i < in.tables.size(); ++i) in.tables[i] = static_cast<int64_t>(i) % kBlocks;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};

  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      std::vector<float> out(kTokens * kWidth), keys(kCache), values(kCache);
      for (int i = 0; i < rounds; ++i)
        if (!is_right((i * 5 + caller * 7 + i / 9) % 9, in, out, keys, values)) ++wrong;
    });
  std::thread changer([&] {
    for (int i = 0; !stop; ++i) {
      pykv_set_num_threads(1 + i % 4);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  for (std::thread& caller : callers) caller.join();
  stop = true;
  changer.join();
  if (wrong) return std::printf("%d calls did not return what they must\n", wrong.load()), 1;
  std::puts("ok");
}
