// Whether products of pairs of bf16 are the quickest here.
#pragma once

namespace pykv::PYKV_ISA {

#if defined(__AVX512BF16__)  // __builtin_cpu_is() is known for x86 alone
// On a Zen 4 one vdpbf16ps takes as long as one of the two FMA that it does the work of; on a Xeon (Emerald Rapids) as long as four or
// five, of which it does the work of two.
inline bool has_quick_pairs() { return __builtin_cpu_is("amd"); }
#endif

}  // namespace pykv::PYKV_ISA
