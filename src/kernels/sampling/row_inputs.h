// Arguments that the entries of this family have in common.
#pragma once

#include "core/call.h"
#include "sampling/token_adjustments.h"

namespace pykv {

// A float32 number, or one for each row.
RowNumbers row_numbers(Call& call, const char* name, const DLTensor* t, const Dim& rows);
// An integer (of Python: a float32 on the host), or one for each row.
RowCounts row_counts(Call& call, const char* name, const DLTensor* t, const Dim& rows);

}  // namespace pykv
