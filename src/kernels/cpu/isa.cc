#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "pykv/cpu.h"

namespace pykv {

Isa cpu_isa() {
  static const Isa isa = [] {
    Isa best = Isa::kBase;
#if defined(__x86_64__) && !defined(PYKV_ONE_ISA)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
      best = Isa::kAvx2;
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512cd")) {
        best = Isa::kAvx512;
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
            __builtin_cpu_supports("avx512vnni"))
          best = Isa::kAvx512Bf16;
      }
    }
    if (const char* wanted = std::getenv("PYKV_ISA")) {
      const auto at_most = [&](const char* name, Isa isa) {
        if (std::strcmp(wanted, name) == 0) best = std::min(best, isa);
      };
      at_most("base", Isa::kBase);
      at_most("avx2", Isa::kAvx2);
      at_most("avx512", Isa::kAvx512);
    }
#endif
    return best;
  }();
  return isa;
}

}  // namespace pykv

const char* pykv_cpu_isa(void) {
  switch (pykv::cpu_isa()) {
    case pykv::Isa::kAvx512Bf16:
      return "avx512bf16";
    case pykv::Isa::kAvx512:
      return "avx512";
    case pykv::Isa::kAvx2:
      return "avx2";
    default:
      return "base";
  }
}
