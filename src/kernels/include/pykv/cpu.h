/* The CPU that operations run on. */
#ifndef PYKV_CPU_H_
#define PYKV_CPU_H_

#include <pykv/base.h>

/* Which build of the CPU kernels this machine runs: "base", "avx2", "avx512" or "avx512bf16"; PYKV_ISA in the environment lowers it.
 * Never NULL. */
PYKV_API const char* pykv_cpu_isa(void);

#endif /* PYKV_CPU_H_ */
