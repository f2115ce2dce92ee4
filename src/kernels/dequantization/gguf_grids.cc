#include "dequantization/gguf_grids.h"

namespace pykv::gguf {

constinit const Grids kHostGrids = make_grids();

}  // namespace pykv::gguf
