// packed_gemm for many rows of x on sm_90a: the tiles of packed_gemm_many.cu with wgmma, whose A operand are the fragments
// that codes are decoded to.
//
// Two warpgroups compute 64 rows of the weight times 128 tokens each.  A third brings x, and the factors of groups, some
// units of columns ahead.  x goes through registers: the 16 columns of a step lie in the order of fragments.
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_gemm_many.cuh"

namespace pykv {
namespace {

using Problem = ManyRows;
constexpr int kUnit = Problem::kUnit, kRows = Problem::kRows;
constexpr int kGroup = 128, kReaders = 2 * kGroup, kThreads = kReaders + kGroup;  // of a warpgroup; that compute; all
constexpr int kTokens = 128, kSums = kTokens / 2;                                 // of a thread
constexpr int kStages = 6, kXBytes = kTokens * kUnit * 2, kSumsOfXBytes = 4 * kTokens * 4;
constexpr int kFactorsAt = kStages * kXBytes, kSumsOfXAt = kFactorsAt + kStages * FactorFeed::kBytes;  // [step][token]
constexpr int kWholeAt = kSumsOfXAt + kStages * kSumsOfXBytes;  // sums of all segments so far
constexpr int kTableAt = kWholeAt + kReaders * kSums * 4, kBarriersAt = kTableAt + 1024;
constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8 + 1024;  // aligned by the kernel
static_assert(kSharedBytes <= 227 << 10 && kTokens * Problem::kPitch * 4 <= kWholeAt);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// A place in the ring, and how often it came round.
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct Ring {
  uint32_t base;

  __device__ uint32_t x(const Stage& s) const { return base + s.index * kXBytes; }
  __device__ uint32_t factors(const Stage& s) const { return base + kFactorsAt + s.index * FactorFeed::kBytes; }
  __device__ uint32_t sums_of_x(const Stage& s) const { return base + kSumsOfXAt + s.index * kSumsOfXBytes; }
  __device__ uint32_t full(const Stage& s) const { return base + kBarriersAt + s.index * 8; }
  __device__ uint32_t empty(const Stage& s) const { return full(s) + kStages * 8; }
};

// The warpgroup that brings x: a thread has 16 columns of four tokens.
template <class T>
class Feeder {
  static constexpr int kItems = kTokens * 4 / kGroup;

 public:
  struct Columns {
    uint4 halves[kItems][2];
  };

  __device__ Feeder(const Problem& p, const Ring& ring, int64_t row_tile, int64_t first_token, int thread,
                    int64_t shift)
      : p_(p),
        ring_(ring),
        thread_(thread),
        row_tile_(static_cast<int>(row_tile)),
        token_tile_(static_cast<int>(first_token / kTokens)),
        shift_(shift) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) x_[i] = p.tokens.of_x<T>(first_token + thread / 4 + 32 * i);
    const PackedWeight& w = p.weight;
    const int64_t block = min(row_tile * (kRows / 16) + thread / 16, w.padded_n() / 16 - 1);
    codes_bytes_ = w.bits() == 8 ? 1024 : 512;  // of 16 rows
    codes_ = w.codes + shift + block * (w.padded_k / kUnit) * codes_bytes_ + thread % 16 * (codes_bytes_ / 16);
  }

  __device__ void run() {
    give_registers<136>();
    const int units = static_cast<int>(p_.weight.padded_k / kUnit);
    if (!p_.whole_chunks) return run_one_by_one(units);
    Columns even, odd;
    if (units > 0) load(even, 0);
    for (int unit = 0; unit < units; unit += 2) {
      if (unit + 1 < units) load(odd, unit + 1);
      put(even, unit);
      if (unit + 2 < units) load(even, unit + 2);
      if (unit + 1 < units) put(odd, unit + 1);
    }
    cp_async_wait<0>();
  }

 private:
  __device__ void load(Columns& to, int unit) const {
    const int64_t column = int64_t{unit} * kUnit + thread_ % 4 * 16;
    prefetch(unit + 4);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4& v = to.halves[i][h];
        v = make_uint4(0, 0, 0, 0);
        if (x_[i] && column + 8 * h < p_.weight.k)
          asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                       : "l"(x_[i] + column + 8 * h));
      }
  }

  __device__ void put(const Columns& from, int unit) {
    begin_unit(unit);
#pragma unroll
    for (int i = 0; i < kItems; ++i) store(i, from.halves[i][0], from.halves[i][1]);
    end_unit();
  }

  __device__ void run_one_by_one(int units) {
    for (int unit = 0; unit < units; ++unit) {
      prefetch(unit + 4);
      begin_unit(unit);
#pragma unroll 1
      for (int i = 0; i < kItems; ++i) {
        const T* const row = p_.tokens.of_x<T>(int64_t{token_tile_} * kTokens + thread_ / 4 + 32 * i);
        uint32_t pairs[8];
        p_.load_one_by_one<T, 16>(pairs, row, int64_t{unit} * kUnit + thread_ % 4 * 16, shift_);
        store(i, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]),
              make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
      }
      end_unit();
    }
    cp_async_wait<0>();
  }

  // Codes to the L2, from where their readers take them.
  __device__ void prefetch(int unit) const {
    if (int64_t{unit} * kUnit < p_.weight.padded_k && thread_ % 16 * codes_bytes_ / 16 % 128 == 0)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(codes_ + int64_t{unit} * codes_bytes_));
  }

  __device__ void begin_unit(int unit) const {
    mbarrier_wait(ring_.empty(stage_), stage_.parity ^ 1);
    FactorFeed::copy(p_, ring_.factors(stage_), row_tile_, unit, thread_, false, shift_);
    if (p_.weight.minima) FactorFeed::copy(p_, ring_.factors(stage_), row_tile_, unit, thread_, true, shift_);
  }

  // 16 columns, in the order of fragments.
  __device__ void store(int i, const uint4& a, const uint4& b) const {
    const uint32_t line = ring_.x(stage_) + (thread_ / 4 + i * 32) * 128;
    const int place = thread_ / 4 % 8, step = thread_ % 4;
    store_shared(line + ((2 * step) ^ place) * 16, make_uint4(a.x, a.z, b.x, b.z));
    store_shared(line + ((2 * step + 1) ^ place) * 16, make_uint4(a.y, a.w, b.y, b.w));
  }

  __device__ void end_unit() {
    if (p_.weight.minima) {
      __syncwarp();
      sum_x();
    }
    fence_async_proxy();
    cp_async_arrive(ring_.full(stage_));
    mbarrier_arrive(ring_.full(stage_));
    stage_.next();
  }

  // Sums of x over each group of the unit, which minima multiply: a warp those of the tokens that it has stored.
  __device__ void sum_x() const {
    constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
    constexpr uint32_t kAll[4] = {kOnes, kOnes, kOnes, kOnes};
    const int lane = thread_ % 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int first = thread_ / 32 * 8 + 32 * i;  // of 8 tokens
      const uint32_t line = ring_.x(stage_) + (first + lane % 8) * 128;
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t x[4];
        ldmatrix_x4(x, line + ((2 * j + lane / 8) ^ lane % 8) * 16);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          mma_16x8x16<T>(sum, kAll, x[2 * next], x[2 * next + 1]);
          if (((j + next + 1) & (p_.steps - 1)) != 0) continue;
          const int step = j + next + 1 - p_.steps;
          if (lane < 4)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(ring_.sums_of_x(stage_) +
                                                                  (step * kTokens + first + 2 * lane) * 4),
                         "f"(sum[0]), "f"(sum[1])
                         : "memory");
#pragma unroll
          for (float& v : sum) v = 0.0f;
        }
      }
    }
  }

  const Problem& p_;
  const Ring& ring_;
  const int thread_;
  const int row_tile_, token_tile_;
  const int64_t shift_;
  const T* x_[kItems];
  const uint8_t* codes_;
  int codes_bytes_;
  Stage stage_;
};

// 16 rows of a warpgroup's 64, by a warp.
template <class T, CodeKind kKind>
class Reader {
  using Code = Codes<T, kKind>;
  struct Words {
    uint4 planes[Code::kPlanes];
  };

 public:
  float total[kSums] = {};  // over a segment; in the end over all

  __device__ Reader(const Problem& p, const Ring& ring, uint8_t* shared, int64_t row_tile, int64_t shift)
      : p_(p),
        w_(p.weight),
        ring_(ring),
        table_(reinterpret_cast<const uint32_t*>(shared + kTableAt)),
        units_(static_cast<int>(p.weight.padded_k / kUnit)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t block = min(row_tile * (kRows / 16) + warp, w_.padded_n() / 16 - 1);  // later ones: not stored
    codes_ = w_.codes + shift + block * units_ * Code::kPlanes * 512 + (lane % 4 * 8 + lane / 4) * 16;
    band_ = warp / 2;
    factor_place_ = lane / 4 * 4 + warp % 2 * 2;
    global_ = __ldg(reinterpret_cast<const float*>(w_.data + shift + PackedWeight::kGlobalScaleAt)) * Code::kUnit;
  }

  __device__ void run() {
    take_registers<184>();  // with those of the feeder, what three warpgroups of 168 have
    if (p_.steps == 4) return run_steps<4>();
    if (p_.steps == 2) return run_steps<2>();
    run_steps<1>();
  }

  // To [token][row], for all threads of the block.
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * Problem::kPitch + row + i / 2 % 2 * 8] = total[i];
  }

 private:
  // kSteps: of 16 columns, that are scaled together.
  template <int kSteps>
  __device__ void run_steps() {
    int segment = 0;
    const auto join_what_ends_at = [&](int unit) {
      while (segment < Problem::kSegments && units_ * (segment + 1) / Problem::kSegments == unit) join(segment++);
    };
    join_what_ends_at(0);
    if (units_ == 0) return;
    uint32_t a[4][4];
    Words words;
    load(words, 0);
    Stage stage;
    for (int unit = 0; unit < units_; ++unit, stage.next()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) Code::fragment(a[j], words.planes, j, table_);
      load(words, unit + 1);
      mbarrier_wait(ring_.full(stage), stage.parity);
      const uint64_t x = wgmma_matrix(ring_.x(stage), 1024);
#pragma unroll
      for (int first = 0; first < 4; first += kSteps) {
        wgmma_pin(sum_);
        wgmma_begin();
#pragma unroll
        for (int j = first; j < first + kSteps; ++j)
          Wgmma<T, kTokens>::template rs<kAlong>(sum_, a[j], wgmma_further(x, j * 32), j > first);
        wgmma_commit();
        Scales scales;
        read(scales, stage, first);
        wgmma_wait<0>();
        wgmma_pin(sum_);
        add_scaled(scales, stage, first);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.empty(stage));
      join_what_ends_at(unit + 1);
    }
  }

  struct Scales {
    float scale[2], minimum[2];
  };

  __device__ void load(Words& words, int unit) const {
    unit = min(unit, units_ - 1);
#pragma unroll
    for (int plane = 0; plane < Code::kPlanes; ++plane) {
      uint4& v = words.planes[plane];
      asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(codes_ + (int64_t{unit} * Code::kPlanes + plane) * 512));
    }
  }

  __device__ void read(Scales& to, const Stage& stage, int step) const {
    const uint32_t factors = ring_.factors(stage), place = (band_ * 4 + step) * 128, super = band_ * 64;
    RawFactors raw;
    load_two_shared(raw.scale, factors + FactorFeed::kScalesAt + place, factor_place_, bytes_of(w_.scales_kind));
    if (w_.supers) load_super(raw.super, factors + FactorFeed::kSupersAt + super);
    if (w_.minima)
      load_two_shared(raw.minimum, factors + FactorFeed::kMinimaAt + place, factor_place_, bytes_of(w_.minima_kind));
    if (w_.lows) load_super(raw.low, factors + FactorFeed::kLowsAt + super);
    scales_of(to.scale, raw, w_.scales_kind);
#pragma unroll
    for (int h = 0; h < 2; ++h) to.scale[h] *= global_;
    if (w_.minima) minima_of(to.minimum, raw, w_.minima_kind, w_.offset, to.scale);
  }
  __device__ void load_super(uint32_t (&into)[2], uint32_t from) const {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(into[0]) : "r"(from + factor_place_ * 2) : "memory");
  }

  __device__ void add_scaled(const Scales& scales, const Stage& stage, int step) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = fmaf(scales.scale[i / 2 % 2], sum_[i], total[i]);
    if (!w_.minima) return;
    const uint32_t of_x = ring_.sums_of_x(stage) + (step * kTokens + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const uint2 two = load_shared_8(of_x + i / 4 * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        total[i + e] = fmaf(scales.minimum[e / 2], __uint_as_float(e % 2 ? two.y : two.x), total[i + e]);
    }
  }

  static __device__ float load_shared_4(uint32_t at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
  }

  // Adds those of a segment to those of the segments before.
  __device__ void join(int segment) {
    const uint32_t whole = ring_.base + kWholeAt + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const uint32_t own = whole + i * kReaders * 4;
      const float sum = segment == 0 ? total[i] : load_shared_4(own) + total[i];
      if (segment < Problem::kSegments - 1) asm volatile("st.shared.f32 [%0], %1;" ::"r"(own), "f"(sum) : "memory");
      total[i] = segment < Problem::kSegments - 1 ? 0.0f : sum;
    }
  }

  const Problem& p_;
  const PackedWeight& w_;
  const Ring& ring_;
  const uint32_t* table_;
  const int units_;
  const uint8_t* codes_;
  int band_, factor_place_;
  float global_;
  float sum_[kSums];
};
#endif

template <class T, CodeKind kKind>
__global__ void __launch_bounds__(kThreads, 1) packed_gemm_warpgroup_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  uint8_t* const shared = unaligned + (-shared_address(unaligned) & 1023);
  const Ring ring{shared_address(shared)};
  if (threadIdx.x == 0) {
    Stage stage;
    for (int i = 0; i < kStages; ++i, stage.next()) {
      mbarrier_init(ring.full(stage), 2 * kGroup);  // each thread, and each thread's cp.async
      mbarrier_init(ring.empty(stage), kReaders / 32);
    }
    fence_async_proxy();
  }
  begin_dependent();
  int64_t row_tile, token_tile;
  p.place(blockIdx.x, row_tile, token_tile);
  const int32_t weight = p.weight_of(token_tile, kTokens);
  if (weight < 0) return;
  const int64_t shift = weight * p.tokens.map.weight_stride;
  if constexpr (kKind == CodeKind::kTable16) {
    const auto* numbers = reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kTableAt);
    if (threadIdx.x < 256)
      reinterpret_cast<uint32_t*>(shared + kTableAt)[threadIdx.x] =
          pack_pair<T>(__ldg(numbers + threadIdx.x % 16), __ldg(numbers + threadIdx.x / 16));
  }
  __syncthreads();
  auto* const sums = reinterpret_cast<float*>(shared);
  if (threadIdx.x >= kReaders) {
    Feeder<T> feeder(p, ring, row_tile, token_tile * kTokens, threadIdx.x - kReaders, shift);
    feeder.run();
    return;
  }
  Reader<T, kKind> reader(p, ring, shared, row_tile, shift);
  reader.run();
  named_barrier_sync(1, kReaders);  // all have done with the ring
  reader.store(sums);
  named_barrier_sync(1, kReaders);
  p.write<T>(sums, row_tile * kRows, token_tile * kTokens, kTokens, kReaders, weight);
#endif
}

}  // namespace

bool packed_gemm_warpgroup_cuda(const PackedGemmArgs& args, const Launch& launch) {
  const int64_t tiles = (args.weight.n + kRows - 1) / kRows * ((args.num_rows + kTokens - 1) / kTokens);
  const bool fills = args.map.rows ? args.map.block_size % kTokens == 0
                                   : args.num_rows > kTokens / 2 && tiles * 10 >= int64_t{num_sms(launch.device)} * 9;
  if (!fills) return false;
  if (!has_warpgroups(launch.device)) return false;
  const auto run = [&]<class T, CodeKind kKind>() {
    with_many_rows(args, kTokens, 1, [&](const Problem& p, dim3 blocks) {
      launch_dependent_shared(packed_gemm_warpgroup_kernel<T, kKind>, blocks, dim3(kThreads), kSharedBytes, launch,
                              "packed_gemm", p);
    });
  };
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    switch (args.weight.codes_kind) {
      case CodeKind::kUint4:
        return run.template operator()<T, CodeKind::kUint4>();
      case CodeKind::kUint8:
        return run.template operator()<T, CodeKind::kUint8>();
      case CodeKind::kE4M3:
        return run.template operator()<T, CodeKind::kE4M3>();
      default:
        return run.template operator()<T, CodeKind::kTable16>();
    }
  });
  return true;
}

}  // namespace pykv
