// Rotation of query and key heads by angles that depend on a token's position.
#pragma once

#include "core/rotation.h"
#include "cpu/isa.h"

namespace pykv {

PYKV_CPU_TWIN(rotary_embedding_cpu, Rotation)
void rotary_embedding_cuda(const Rotation& args, const Launch& launch);

}  // namespace pykv
