#include "activation/parameter.h"

#include "core/call.h"

namespace pykv {

Parameter parameter(Call& call, const char* name, const DLTensor* t) {
  if (!t) fail(PYKV_TYPE_ERROR, "%s: is required", name);
  const Scale s = call.scale(name, t, 1);
  return {s.data, s.values[0]};
}

}  // namespace pykv
