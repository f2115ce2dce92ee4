// The argument quant_type of operations that decode blocks of GGUF.
#pragma once

#include <cinttypes>

#include "core/call.h"
#include "dequantization/gguf_types.h"

namespace pykv::gguf {

inline BlockSize known_block_size(int64_t quant_type) {
  const auto size = quant_type == static_cast<int32_t>(quant_type)
                        ? block_size(static_cast<Type>(static_cast<int32_t>(quant_type)))
                        : BlockSize{0, 0};
  if (size.elements == 0)
    fail(PYKV_VALUE_ERROR,
         "quant_type: must be the id of a block format of GGUF (2, 3, 6 to 23, 29, 34, 35, 39 to 41), got %" PRId64,
         quant_type);
  return size;
}

}  // namespace pykv::gguf
