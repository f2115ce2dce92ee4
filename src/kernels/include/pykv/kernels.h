/* pykv: paged KV-cache, attention and other inference kernels.  This header is all of them. */
#ifndef PYKV_KERNELS_H_
#define PYKV_KERNELS_H_

#include <pykv/activation.h>
#include <pykv/attention.h>
#include <pykv/base.h>
#include <pykv/cache.h>
#include <pykv/cpu.h>
#include <pykv/dequantization.h>
#include <pykv/embedding.h>
#include <pykv/gemm.h>
#include <pykv/moe.h>
#include <pykv/norm.h>
#include <pykv/quantization.h>
#include <pykv/rotary.h>
#include <pykv/sampling.h>

#endif /* PYKV_KERNELS_H_ */
