// The floating-point environment of a call.  A caller may flush denormal numbers (torch.set_flush_denormal, -ffast-math,
// XLA's threads) or round another way; results must not depend on it.
#pragma once

#include <cstdint>

namespace pykv {

// While it lives this thread rounds to nearest, keeps denormal numbers and traps nothing.
class UsualArithmetic {
 public:
  UsualArithmetic() : before_(control()) {
    if (is_unusual()) [[unlikely]]
      set_control(kUsual);
  }
  ~UsualArithmetic() {
    if (is_unusual()) [[unlikely]]
      set_control(before_);
  }
  UsualArithmetic(const UsualArithmetic&) = delete;
  UsualArithmetic& operator=(const UsualArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kUsual = 0x1f80;  // MXCSR: every exception masked
  static constexpr Control kFlags = 0x3f;    // what has happened so far
  static Control control() {
    Control now;
    asm volatile("stmxcsr %0" : "=m"(now));
    return now;
  }
  static void set_control(Control wanted) { asm volatile("ldmxcsr %0" : : "m"(wanted) : "memory"); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kUsual = 0;  // FPCR; its flags are in another register
  static constexpr Control kFlags = 0;
  static Control control() {
    Control now;
    asm volatile("mrs %0, fpcr" : "=r"(now));
    return now;
  }
  static void set_control(Control wanted) { asm volatile("msr fpcr, %0" : : "r"(wanted) : "memory"); }
#endif
  bool is_unusual() const { return (before_ & ~kFlags) != kUsual; }

  Control before_;
};

}  // namespace pykv
