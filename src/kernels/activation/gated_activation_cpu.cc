// result = R_T( R_T(activation(gate)) * up ), the activation in fp32.
//
// Work is handed out in pieces of rows, so that one long row keeps all threads busy; while a piece is worked out the next one
// is prefetched, gates with the activations and ups with the products.
//
// The activation, the product and its code are steps of their own, each with some results at a time: see in_two_steps.
//
// In bf16 with AVX-512, Zen 5 takes 18 cycles for 32 results of silu_and_mul and 30 of gelu_and_mul, where one of two cores that
// copy together moves the 192 bytes in 20 to 37, as the neighbours of a virtual machine leave it.  By a static scale silu
// takes 23 for 160 bytes.  Without AVX-512 the exponential bounds it.
#include <algorithm>

#include "activation/activations_cpu.h"
#include "activation/gated_activation.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 2048;  // elements of a row in one piece

// What becomes of the products: numbers of T ...
template <class T>
struct Rounded {
  using Element = T;
  explicit Rounded(const GatedActivationArgs&) {}
};

// ... or the codes of R_T(product) * (1 / scale).
template <class T>
struct InE4M3 {
  using Element = e4m3;
  Encoder<T, e4m3, TimesInverse> encoder;
  explicit InE4M3(const GatedActivationArgs& args) : encoder(args.scale, args.num_rows * args.width) {}
  void operator()(e4m3* to, const T* from, int64_t n, bool past) const { encoder(to, from, n, past); }
};
template <class T>
struct InInt8 {
  using Element = int8_t;
  float inverse;
  explicit InInt8(const GatedActivationArgs& args) : inverse(1.0f / args.scale) {}
  void operator()(int8_t* to, const T* from, int64_t n, bool past) const {
    each_pair(0, n, [=, factor = inverse](int64_t i, int64_t count) {
      store_quantised(to + i, load_pair<T>(from + i, count) * factor, count, past);
    });
  }
};

// Gates and ups of `count` results from memory where they take turns, in any order that both share with `back`.
template <class T>
struct Interleaved {
  Pair<T> gate, up;

  Interleaved(const T* from, int64_t count) {
    const int64_t left = 2 * count - kPair;
    const Pair<T> first = load_pair<T>(from, 2 * count), second = left > 0 ? load_pair<T>(from + kPair, left) : 0.0f;
    if constexpr (kAlternating<T>) {
      gate = {first.x, second.x};
      up = {first.y, second.y};
    } else {
      gate = {every_other(first.x, first.y, 0), every_other(second.x, second.y, 0)};
      up = {every_other(first.x, first.y, 1), every_other(second.x, second.y, 1)};
    }
  }
};

// Elements of a row: a piece of it, or what follows somewhere in one.
template <class T, class Element, bool kInterleaved>
struct Piece {
  const T *gate, *up;
  Element* result;
  int64_t size;

  Piece(const GatedActivationArgs& args, int64_t row, int64_t first) {
    const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(row);
    gate = input + args.gate + (kInterleaved ? 2 * first : first);
    up = input + args.up + first;
    result = static_cast<Element*>(args.result) + args.result_rows.offset(row) + first;
    size = std::min(kPiece, args.width - first);
  }
  void prefetch_gate(int64_t i) const { prefetch_pair(gate + (kInterleaved ? 2 * i : i)); }
  void prefetch_up(int64_t i) const { prefetch_pair(kInterleaved ? gate + 2 * i + kPair : up + i); }
};

// R_T(activation(gate)) * up
template <class Activation>
struct Activated {
  Activation activation;
};

// `size` products of a piece from `first` on: op(gate, up) for pairs.
template <bool kInterleaved, class T, class Op, class Element>
void multiply(T* to, const Piece<T, Element, kInterleaved>& piece, const Piece<T, Element, kInterleaved>& next,
              int64_t first, int64_t size, bool past, const Op& op) {
  each_pair(0, size, [=](int64_t i, int64_t count) {
    const int64_t at = first + i;
    next.prefetch_gate(at);
    next.prefetch_up(at);
    if constexpr (kInterleaved) {
      const Interleaved<T> both(piece.gate + 2 * at, count);
      const Pair<T> products = op(both.gate, both.up);
      store_pair(to + i, in_order<T>(products.x, products.y), count, past);
    } else {
      store_pair(to + i, op(load_pair<T>(piece.gate + at, count), load_pair<T>(piece.up + at, count)), count, past);
    }
  });
}
template <class T, class Activation, class Element>
void multiply(T* to, const Piece<T, Element, false>& piece, const Piece<T, Element, false>& next, int64_t first,
              int64_t size, bool past, const Activated<Activation>& op) {
  in_two_steps<T>(
      to, size,
      [&](T* activated, int64_t begin, int64_t n) {
        each_pair(0, n, [=, gate = piece.gate + first + begin](int64_t i, int64_t count) {
          next.prefetch_gate(first + begin + i);
          store_pair(activated + i, op.activation(load_pair<T>(gate + i, count)), count, false);
        });
      },
      [&](T* at, const T* activated, int64_t n) {
        const int64_t begin = first + (at - to);
        each_pair(0, n, [=, up = piece.up + begin](int64_t i, int64_t count) {
          next.prefetch_up(begin + i);
          const Pair<T> factor = load_pair<T>(up + i, count) + 0.0f;  // -0 counts as 0
          store_pair(at + i, load_pair<T>(activated + i, count) * factor, count, past);
        });
      });
}

// make_op.operator()<T>() gives the op for arrays of T.
template <bool kInterleaved = false, template <class> class Result = Rounded, class MakeOp>
void run(const GatedActivationArgs& args, MakeOp make_op) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, 4 * kPiece / args.width);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    using Element = typename Result<T>::Element;
    const auto op = make_op.template operator()<T>();
    const bool streamed = args.num_rows * args.width * static_cast<int64_t>(sizeof(Element)) > kWorthStreaming;
    const auto piece_at = [&](int64_t piece) {
      return Piece<T, Element, kInterleaved>(args, piece / pieces, piece % pieces * kPiece);
    };
    const Result<T> result(args);
    parallel_for(args.num_rows * pieces, grain, [&](int64_t begin, int64_t end) {
      LineWriter writer(streamed);
      for (int64_t k = begin; k < end; ++k) {
        if (!args.mask.has(k / pieces)) continue;
        const auto piece = piece_at(k), next = piece_at(std::min(k + 1, end - 1));
        const auto fill = [&](Element* to, int64_t first, int64_t size, bool past) {
          if constexpr (std::is_same_v<Element, T>) {
            multiply(to, piece, next, first, size, past, op);
          } else {
            in_two_steps<T>(
                to, size,
                [&](T* products, int64_t begin, int64_t n) {
                  multiply(products, piece, next, first + begin, n, false, op);
                },
                [&](Element* at, const T* products, int64_t n) { result(at, products, n, past); });
          }
        };
        write_pairs(writer, piece.result, piece.size, streamed, fill);
      }
      if (streamed) finish_streaming();
    });
  });
}

template <template <class> class Result = Rounded, class Activation>
void run_activation(const GatedActivationArgs& args, Activation activation) {
  run<false, Result>(args, [=]<class T>() { return Activated<Activation>{activation}; });
}

// NaN gives the limit.
template <class T>
Pair<T> at_most(Pair<T> x, float limit) {
  return min(x, Pair<T>(limit));
}
template <class T>
Pair<T> within(Pair<T> x, float limit) {
  return max(at_most(x, limit), Pair<T>(-limit));
}

}  // namespace

void silu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](auto x) { return exact_silu(x); });
}

void silu_and_mul_quant_cpu(const GatedActivationArgs& args, const Launch&) {
  const auto activation = [](auto x) { return exact_silu(x); };
  if (args.result_dtype == DType::kInt8) {
    run_activation<InInt8>(args, activation);
  } else {
    run_activation<InE4M3>(args, activation);
  }
}

void gelu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](auto x) { return gelu(x); });
}

void gelu_tanh_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](auto x) { return gelu_tanh(x); });
}

void fatrelu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [threshold = args.limit](auto x) {
    return each(x, [=](Floats v) { return v > threshold ? v : Floats{}; });
  });
}

void silu_and_mul_with_clamp_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [&]<class T>() {
    // a gate's min(x, limit), rounded to T, is min(x, limit rounded to T)
    const float limit = plain(args.limit), gate_limit = to_float(from_float<T>(limit));
    return [=, alpha = plain(args.alpha), beta = plain(args.beta)](Pair<T> a, Pair<T> b) {
      const Pair<T> gate = at_most(a, gate_limit);
      return rounded(exactly_times_sigmoid(gate, alpha * gate)) * (within(b, limit) + beta);
    };
  });
}

void swigluoai_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run<true>(args, [&]<class T>() {
    return [alpha = plain(args.alpha), limit = plain(args.limit)](Pair<T> a, Pair<T> b) {
      const Pair<T> gate = at_most(a, limit);
      return (within(b, limit) + 1.0f) * times_sigmoid(gate, alpha * gate);
    };
  });
}

void swiglustep_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [&]<class T>() {
    return [limit = plain(args.limit)](Pair<T> a, Pair<T> b) { return at_most(silu(a), limit) * within(b, limit); };
  });
}

void situ_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [situ = Situ{plain(args.beta), plain(args.limit)}]<class T>() { return situ; });
}

}  // namespace pykv::PYKV_ISA
