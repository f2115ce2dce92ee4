// Small floats with a scale for each group of them, a rectangle of rows and columns: code * scale, rounded once more to the dtype.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

enum class SmallFloat : uint8_t { kE4M3, kE5M2, kE2M1 };

// What the scale of a group is: the one number; an element of an array; of nvfp4 that divided by the number; a power of two.
enum class GroupScale : uint8_t { kNumber, kFloat, kE4M3, kE8M0 };

struct ScaledDequantizeArgs {
  SmallFloat codes_are;
  GroupScale scale_is;
  DType dtype;  // of the output
  const uint8_t* codes;
  const void* scales;
  void* output;
  Parameter number;
  int64_t matrices, rows, columns;
  int64_t group_rows, group_columns;
  int64_t code_matrix, code_row;                  // bytes from one to the next
  int64_t output_matrix, output_row;              // elements
  int64_t scale_matrix, scale_row, scale_column;  // elements, from group to group
  int64_t swizzled_columns;                       // tiles of 128 rows and 4 groups: so many side by side; 0: strides

  // The element of `scales` for a group of rows (each its own where scales are swizzled) and one of columns.  Inlined by force: it must not be a symbol that CPU twins share.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t scale_at(int64_t matrix, int64_t row, int64_t group) const {
    if (swizzled_columns == 0) return matrix * scale_matrix + row * scale_row + group * scale_column;
    return matrix * scale_matrix + (row / 128 * swizzled_columns + group / 4) * 512 + row % 32 * 16 +
           row % 128 / 32 * 4 + group % 4;
  }
};

PYKV_CPU_TWIN(scaled_dequantize_cpu, ScaledDequantizeArgs)
void scaled_dequantize_cuda(const ScaledDequantizeArgs& args, const Launch& launch);

}  // namespace pykv
