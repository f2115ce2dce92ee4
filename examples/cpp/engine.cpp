// A decode loop from C++: continues prompts with a Llama checkpoint.  pykv does all but the matrix products, which are a plain loop
// here; built with ENGINE_CUDA all runs on a GPU, and cuBLAS makes them.  The tokens are those of examples/generate.py with the same
// temperature and seed, either way.
//
//   engine [--temperature T] [--seed N] [--top-k K] [--top-p P] FOLDER NEW_TOKENS 12,34,56 [78,90 ...]
//
// Without a temperature the likeliest token is taken.  Prompts are token ids; a line of new ones is printed for each.  All prompts
// are computed in one ragged batch, then each step gives every sequence that is not done one token more.  examples/llama.py and
// engine.py are the same at more length.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <pykv/kernels.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>
#ifdef ENGINE_CUDA
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#endif

namespace {

using pykv::ConstTensor;
using pykv::Tensor;

// --- where arrays lie, and what the device does without pykv ------------------------------------------

#ifdef ENGINE_CUDA

constexpr DLDevice kDevice{kDLCUDAManaged, 0};

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Memory that host and GPU share: the driver moves pages to the one that touches them.
template <class T>
struct Memory {
  using value_type = T;
  Memory() = default;
  template <class U>
  Memory(const Memory<U>&) {}
  T* allocate(size_t count) {
    void* memory = nullptr;
    check(cudaMallocManaged(&memory, count * sizeof(T)));
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { cudaFree(memory); }  // waits for the device
  friend bool operator==(const Memory&, const Memory&) { return true; }
  friend bool operator!=(const Memory&, const Memory&) { return false; }
};

// Afterwards the host may read what the device has written.
void wait() {
  check(cudaDeviceSynchronize());
  pykv::check(pykv_check_errors(pykv::cuda()));
}

// result [rows, out] = x [rows, in] times the transpose of matrix [out, in].  cuBLAS counts by columns, so that all three are
// their own transposes to it.
void multiply(float* result, const float* x, const float* matrix, int rows, int out, int in) {
  static const cublasHandle_t blas = [] {
    cublasHandle_t handle = nullptr;
    if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) throw std::runtime_error("cuBLAS does not start");
    return handle;
  }();
  const float one = 1, zero = 0;
  if (cublasSgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, out, rows, in, &one, matrix, in, x, in, &zero, result, out) !=
      CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error("cuBLAS failed");
}

#else

constexpr DLDevice kDevice = pykv::cpu;

template <class T>
using Memory = std::allocator<T>;

void wait() {}

void multiply(float* result, const float* x, const float* matrix, int rows, int out, int in) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < out; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * matrix[o * in + i];
      result[r * out + o] = sum;
    }
}

#endif

template <class T>
using Array = std::vector<T, Memory<T>>;
using Floats = Array<float>;

template <class T>
ConstTensor view(const Array<T>& values) {
  return {values.data(), {static_cast<int64_t>(values.size())}, kDevice};
}

// --- files: just as much JSON as config.json and the header of a safetensors file want ----------------

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What stands behind "key":.
const char* value(const std::string& json, const std::string& key) {
  const size_t at = json.find('"' + key + '"');
  if (at == std::string::npos) throw std::runtime_error("there is no \"" + key + '"');
  return json.c_str() + json.find(':', at + key.size() + 2) + 1;
}

double number(const std::string& json, const std::string& key) {
  const char* text = value(json, key);
  char* end = nullptr;
  const double result = std::strtod(text, &end);
  if (end == text) throw std::runtime_error('"' + key + "\" is not a number");
  return result;
}

int64_t integer(const std::string& json, const std::string& key) { return static_cast<int64_t>(number(json, key)); }

class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : bytes_(contents(path)) {
    uint64_t length = 0;
    if (bytes_.size() >= sizeof length) std::memcpy(&length, bytes_.data(), sizeof length);
    if (length == 0 || length > bytes_.size() - sizeof length)
      throw std::runtime_error(path + " is no safetensors file");
    header_ = bytes_.substr(sizeof length, length);
    data_ = sizeof length + length;
  }

  // Appends a tensor of bfloat16 or float32 to `weights`.
  void append(Floats& weights, const std::string& name) const {
    const char* entry = value(header_, name);
    const std::string fields(entry, std::strcspn(entry, "}"));
    size_t begin = 0, end = 0;
    if (std::sscanf(value(fields, "data_offsets"), " [ %zu , %zu", &begin, &end) != 2 || begin > end ||
        end > bytes_.size() - data_)
      throw std::runtime_error(name + ": its data lie outside the file");
    const char* from = bytes_.data() + data_ + begin;
    const bool bf16 = fields.find("\"BF16\"") != std::string::npos;
    if (!bf16 && fields.find("\"F32\"") == std::string::npos)
      throw std::runtime_error(name + ": neither bfloat16 nor float32");
    const size_t size = bf16 ? 2 : 4, count = (end - begin) / size, old = weights.size();
    weights.resize(old + count);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, from + i * size, size);
      if (bf16) bits <<= 16;  // bfloat16 is the upper half of a float
      std::memcpy(&weights[old + i], &bits, sizeof bits);
    }
  }

 private:
  std::string bytes_, header_;
  size_t data_ = 0;
};

// --- the model ------------------------------------------------------------------------------------

struct Layer {
  Floats input_norm, qkv, out, mlp_norm, gate_up, down;  // matrices are [out, in]
  Floats key_cache, value_cache;                         // [blocks, kBlock, kv heads, head size]
};

// How a token is drawn from the logits.
struct Sampling {
  Array<float> temperature{0.0f}, top_p{1.0f};
  Array<int32_t> top_k{0};  // 0: all
  int64_t seed = 0;         // that of the first sequence; others have those behind it
};

// Tokens of several sequences, one sequence behind the other; see llama.py.
struct Batch {
  Array<int64_t> tokens, positions, slots, seeds, steps;
  Array<int32_t> cu_query_lens{0}, seq_lens, block_tables;  // block_tables: one row for each sequence
};

constexpr int64_t kBlock = 16;  // tokens in a block of the cache

// [rows, in] times the transpose of [out, in].
Floats matmul(const float* x, int64_t rows, const Floats& matrix, int64_t in) {
  const int64_t out = static_cast<int64_t>(matrix.size()) / in;
  Floats result(rows * out);
  multiply(result.data(), x, matrix.data(), static_cast<int>(rows), static_cast<int>(out), static_cast<int>(in));
  return result;
}

class Llama {
 public:
  int64_t max_length, end_id;

  Llama(const std::string& folder, int64_t num_blocks) : num_blocks_(num_blocks) {
    const std::string config = contents(folder + "/config.json");
    const Safetensors file(folder + "/model.safetensors");
    if (config.find("\"LlamaForCausalLM\"") == std::string::npos ||
        config.find("\"rope_scaling\"") != std::string::npos)
      throw std::runtime_error("config.json: only the Llama architecture is known here, with plain rope");
    hidden_ = integer(config, "hidden_size");
    intermediate_ = integer(config, "intermediate_size");
    heads_ = integer(config, "num_attention_heads");
    kv_heads_ = integer(config, "num_key_value_heads");
    head_size_ = integer(config, "head_dim");
    epsilon_ = number(config, "rms_norm_eps");
    max_length = integer(config, "max_position_embeddings");
    end_id = integer(config, "eos_token_id");
    const char* tied = value(config, "tie_word_embeddings");

    auto weight = [&](std::initializer_list<const char*> names, const std::string& prefix) {
      Floats together;
      for (const char* name : names) file.append(together, prefix + name + ".weight");
      return together;
    };
    embedding_ = weight({"embed_tokens"}, "model.");
    if (std::strncmp(tied + std::strspn(tied, " "), "true", 4) != 0) head_ = weight({"lm_head"}, "");
    norm_ = weight({"norm"}, "model.");
    layers_.resize(integer(config, "num_hidden_layers"));
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      Layer& layer = layers_[i];
      layer.input_norm = weight({"input_layernorm"}, prefix);
      layer.qkv = weight({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, prefix);
      layer.out = weight({"self_attn.o_proj"}, prefix);
      layer.mlp_norm = weight({"post_attention_layernorm"}, prefix);
      layer.gate_up = weight({"mlp.gate_proj", "mlp.up_proj"}, prefix);
      layer.down = weight({"mlp.down_proj"}, prefix);
      layer.key_cache.resize(num_blocks * kBlock * kv_heads_ * head_size_);
      layer.value_cache = layer.key_cache;
    }

    const double base = number(config, "rope_theta");
    const int64_t half = head_size_ / 2;
    for (int64_t position = 0; position < max_length; ++position)
      for (int64_t j = 0; j < head_size_; ++j) {  // cosines of a position, then sines
        const auto frequency = static_cast<float>(std::pow(base, -2.0 * (j % half) / head_size_));
        const float angle = static_cast<float>(position) * frequency;
        cos_sin_.push_back(j < half ? std::cos(angle) : std::sin(angle));
      }
  }

  // The token after the last one of each sequence of the batch.
  Array<int64_t> next(const Batch& batch, const Sampling& sampling) {
    const auto rows = static_cast<int64_t>(batch.tokens.size());
    Floats residual(rows * hidden_);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = batch.tokens[r];
      if (token < 0 || token >= static_cast<int64_t>(embedding_.size()) / hidden_)
        throw std::out_of_range("token " + std::to_string(token) + " is not in the vocabulary");
      std::copy_n(&embedding_[token * hidden_], hidden_, &residual[r * hidden_]);
    }
    Floats x(residual.size());
    auto normed = [&](Floats& data) { return Tensor(data.data(), {rows, hidden_}, kDevice); };
    pykv::call(pykv_rms_norm, normed(x), normed(residual), view(layers_[0].input_norm), epsilon_);
    for (size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      x = matmul(attention(x, layer, batch).data(), rows, layer.out, heads_ * head_size_);
      // residual += x; x = norm(residual)
      pykv::call(pykv_fused_add_rms_norm, normed(x), normed(residual), view(layer.mlp_norm), epsilon_);
      const Floats gate_up = matmul(x.data(), rows, layer.gate_up, hidden_);
      Floats gated(rows * intermediate_);
      pykv::call(pykv_silu_and_mul, Tensor(gated.data(), {rows, intermediate_}, kDevice),
                 ConstTensor(gate_up.data(), {rows, 2 * intermediate_}, kDevice));
      x = matmul(gated.data(), rows, layer.down, intermediate_);
      const Floats& after = i + 1 < layers_.size() ? layers_[i + 1].input_norm : norm_;
      pykv::call(pykv_fused_add_rms_norm, normed(x), normed(residual), view(after), epsilon_);
    }
    const Floats& head = head_.empty() ? embedding_ : head_;
    const auto vocabulary = static_cast<int64_t>(head.size()) / hidden_,
               seqs = static_cast<int64_t>(batch.seeds.size());
    Floats logits(seqs * vocabulary);
    for (int64_t s = 0; s < seqs; ++s)
      multiply(&logits[s * vocabulary], &x[(batch.cu_query_lens[s + 1] - 1) * hidden_], head.data(), 1,
               static_cast<int>(vocabulary), static_cast<int>(hidden_));
    Array<int64_t> chosen(seqs);
    // A draw depends on the sequence's seed and its number of tokens, not on its neighbours.
    pykv::call(pykv_sample, Tensor(chosen.data(), {seqs}, kDevice),
               ConstTensor(logits.data(), {seqs, vocabulary}, kDevice), view(batch.seeds), view(batch.steps),
               view(sampling.temperature), view(sampling.top_k), view(sampling.top_p), nullptr, nullptr, nullptr,
               nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr);
    wait();
    return chosen;
  }

 private:
  Floats attention(const Floats& x, Layer& layer, const Batch& batch) const {
    const auto rows = static_cast<int64_t>(batch.tokens.size()), seqs = static_cast<int64_t>(batch.seq_lens.size());
    Floats projected = matmul(x.data(), rows, layer.qkv, hidden_);
    const Tensor qkv(projected.data(), {rows, heads_ + 2 * kv_heads_, head_size_}, kDevice);
    const Tensor query = qkv.slice(1, 0, heads_);
    const Tensor key = qkv.slice(1, heads_, heads_ + kv_heads_);
    const Tensor values = qkv.slice(1, heads_ + kv_heads_, heads_ + 2 * kv_heads_);
    const pykv::Sizes of_cache = {num_blocks_, kBlock, kv_heads_, head_size_};
    const Tensor key_cache(layer.key_cache.data(), of_cache, kDevice);
    const Tensor value_cache(layer.value_cache.data(), of_cache, kDevice);
    const ConstTensor block_tables(batch.block_tables.data(),
                                   {seqs, static_cast<int64_t>(batch.block_tables.size()) / seqs}, kDevice);
    pykv::call(pykv_rotary_and_cache, view(batch.positions), query, key, values,
               ConstTensor(cos_sin_.data(), {max_length, head_size_}, kDevice), true, key_cache, value_cache,
               view(batch.slots), "auto", nullptr, nullptr, 0);
    Floats attended(rows * heads_ * head_size_);
    const ConstTensor cu_query_lens = view(batch.cu_query_lens);
    pykv_paged_attention_options options = PYKV_PAGED_ATTENTION_OPTIONS;  // causal, scaled by 1 / sqrt(head size)
    options.cu_query_lens = cu_query_lens;
    pykv::call(pykv_paged_attention, Tensor(attended.data(), {rows, heads_, head_size_}, kDevice), query, key_cache,
               value_cache, block_tables, view(batch.seq_lens), &options);
    return attended;
  }

  int64_t num_blocks_, hidden_, intermediate_, heads_, kv_heads_, head_size_;
  double epsilon_;
  Floats embedding_, head_, norm_, cos_sin_;  // head_ is empty where the embedding serves as one
  std::vector<Layer> layers_;
};

// --- the loop -------------------------------------------------------------------------------------

struct Sequence {
  std::vector<int64_t> tokens;  // the prompt, then what was generated
  size_t prompt_length;
  int64_t seed;
  size_t cached = 0;  // tokens whose keys and values the cache holds
  std::vector<int32_t> blocks = {};
  bool done = false;
};

// All tokens of these sequences that the cache does not hold yet; blocks are taken where they are needed.
Batch batch_of(const std::vector<Sequence*>& sequences, std::vector<int32_t>& free_blocks) {
  Batch batch;
  size_t width = 0;
  for (Sequence* s : sequences) {
    for (; s->cached < s->tokens.size(); ++s->cached) {
      const auto position = static_cast<int64_t>(s->cached);
      if (position % kBlock == 0) {
        s->blocks.push_back(free_blocks.back());
        free_blocks.pop_back();
      }
      batch.tokens.push_back(s->tokens[position]);
      batch.positions.push_back(position);
      batch.slots.push_back(s->blocks.back() * kBlock + position % kBlock);
    }
    batch.cu_query_lens.push_back(static_cast<int32_t>(batch.tokens.size()));
    batch.seq_lens.push_back(static_cast<int32_t>(s->tokens.size()));
    batch.seeds.push_back(s->seed);
    batch.steps.push_back(static_cast<int64_t>(s->tokens.size()));
    width = std::max(width, s->blocks.size());
  }
  for (const Sequence* s : sequences) {
    std::vector<int32_t> row = s->blocks;
    row.resize(width);  // what lies behind a sequence's length is not read
    batch.block_tables.insert(batch.block_tables.end(), row.begin(), row.end());
  }
  return batch;
}

void run(const std::string& folder, size_t new_tokens, const Sampling& sampling, std::vector<Sequence>& sequences) {
  int64_t num_blocks = 0;
  for (const Sequence& s : sequences)
    num_blocks += (static_cast<int64_t>(s.tokens.size() + new_tokens) + kBlock - 1) / kBlock;
  Llama model(folder, num_blocks);
  std::vector<int32_t> free_blocks(num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) free_blocks[i] = static_cast<int32_t>(i);
  for (const Sequence& s : sequences)
    if (s.tokens.empty() || s.tokens.size() >= static_cast<size_t>(model.max_length))
      throw std::invalid_argument("a prompt must have 1 to " + std::to_string(model.max_length - 1) + " tokens");

  while (true) {
    std::vector<Sequence*> running;
    for (Sequence& s : sequences)
      if (!s.done && s.tokens.size() < s.prompt_length + new_tokens) running.push_back(&s);
    if (running.empty()) return;
    const Array<int64_t> chosen = model.next(batch_of(running, free_blocks), sampling);
    for (size_t i = 0; i < running.size(); ++i) {
      Sequence& s = *running[i];
      s.tokens.push_back(chosen[i]);
      s.done = chosen[i] == model.end_id || s.tokens.size() >= static_cast<size_t>(model.max_length);
    }
  }
}

// Reads the options before the folder, and gives the place of that.
int read_options(int argc, char** argv, Sampling& sampling) {
  int i = 1;
  for (; i + 1 < argc && std::strncmp(argv[i], "--", 2) == 0; i += 2) {
    const std::string name = argv[i] + 2, text = argv[i + 1];
    size_t end = 0;
    if (name == "temperature") {
      sampling.temperature[0] = std::stof(text, &end);
    } else if (name == "top-p") {
      sampling.top_p[0] = std::stof(text, &end);
    } else if (name == "top-k") {
      sampling.top_k[0] = std::stoi(text, &end);
    } else if (name == "seed") {
      sampling.seed = std::stoll(text, &end);
    } else {
      throw std::invalid_argument("there is no option --" + name);
    }
    if (end != text.size()) throw std::invalid_argument("--" + name + ": not a number: " + text);
  }
  return i;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Sampling sampling;
    const int folder = read_options(argc, argv, sampling);
    if (argc < folder + 3) {
      std::cerr << "usage: engine [--temperature T] [--seed N] [--top-k K] [--top-p P] FOLDER NEW_TOKENS 12,34,56 "
                   "[78,90 ...]\n";
      return 2;
    }
    std::vector<Sequence> sequences;
    for (int i = folder + 2; i < argc; ++i) {
      std::vector<int64_t> tokens;
      std::istringstream ids(argv[i]);
      for (std::string id; std::getline(ids, id, ',');) tokens.push_back(std::stoll(id));
      sequences.push_back({tokens, tokens.size(), sampling.seed + static_cast<int64_t>(sequences.size())});
    }
    run(argv[folder], std::stoul(argv[folder + 1]), sampling, sequences);
    for (const Sequence& s : sequences) {
      for (size_t i = s.prompt_length; i < s.tokens.size(); ++i)
        std::cout << (i > s.prompt_length ? " " : "") << s.tokens[i];
      std::cout << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << "engine: " << error.what() << '\n';
    return 1;
  }
}
