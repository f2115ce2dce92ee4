// The arrays of activations, checked.
#pragma once

#include "activation/elementwise_activation.h"
#include "activation/gated_activation.h"
#include "core/call.h"

namespace pykv {

// Args of plain halves.  `quantised` results are codes, else numbers of the input's dtype.
GatedActivationArgs gated_args(Call& call, const DLTensor* input, const char* result_name, DLTensor* result,
                               bool quantised = false);

ElementwiseActivationArgs elementwise_args(Call& call, DLTensor* out, const DLTensor* input);

// Interleaved rows are read while others of their elements are written.
void not_in_place(const GatedActivationArgs& args);

}  // namespace pykv
