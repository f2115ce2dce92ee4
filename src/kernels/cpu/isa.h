// CPU twins are compiled once for each instruction set from one source and chosen at run time.
//
// A twin lives in namespace pykv::PYKV_ISA; helpers it includes must be in that namespace (or static), since a weak
// inline symbol compiled for AVX-512 could otherwise be the one that an old CPU runs.
#pragma once

#include "core/launch.h"

namespace pykv {

enum class Isa { kBase, kAvx2, kAvx512, kAvx512Bf16 };  // the last one with AVX512_VBMI, too: Zen 4, Sapphire Rapids

// The best instruction set of this machine; PYKV_ISA=base|avx2|avx512|avx512bf16 in the environment lowers it.
Isa cpu_isa();

}  // namespace pykv

// Declares the twins of one op and the function that runs the one for this machine.  Products alone (attention, GEMM) have one
// for AVX512_BF16: for all others it takes as long as the one for AVX-512 (CMakeLists.txt names these files).
#if defined(__x86_64__) && !defined(PYKV_ONE_ISA)
#define PYKV_TWIN_OF(ISA, NAME, ARGS)                \
  namespace ISA {                                    \
  void NAME(const ARGS& args, const Launch& launch); \
  }
#define PYKV_TWINS(NAME, ARGS, BEST)                         \
  PYKV_TWIN_OF(base, NAME, ARGS)                             \
  PYKV_TWIN_OF(avx2, NAME, ARGS)                             \
  PYKV_TWIN_OF(avx512, NAME, ARGS)                           \
  PYKV_TWIN_OF(BEST, NAME, ARGS)                             \
  inline void NAME(const ARGS& args, const Launch& launch) { \
    switch (cpu_isa()) {                                     \
      case Isa::kAvx512Bf16:                                 \
        return BEST::NAME(args, launch);                     \
      case Isa::kAvx512:                                     \
        return avx512::NAME(args, launch);                   \
      case Isa::kAvx2:                                       \
        return avx2::NAME(args, launch);                     \
      default:                                               \
        return base::NAME(args, launch);                     \
    }                                                        \
  }
#define PYKV_CPU_TWIN(NAME, ARGS) PYKV_TWINS(NAME, ARGS, avx512)
#define PYKV_CPU_TWIN_OF_PRODUCTS(NAME, ARGS) PYKV_TWINS(NAME, ARGS, avx512bf16)
#else
#define PYKV_CPU_TWIN(NAME, ARGS)                    \
  namespace base {                                   \
  void NAME(const ARGS& args, const Launch& launch); \
  }                                                  \
  inline void NAME(const ARGS& args, const Launch& launch) { base::NAME(args, launch); }
#define PYKV_CPU_TWIN_OF_PRODUCTS PYKV_CPU_TWIN
#endif
