#include "core/error.h"

#include <cstdarg>
#include <cstdio>

namespace pykv {
namespace {
thread_local std::string last_error;
}

void fail(pykv_status status, const char* format, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  throw Error(status, buffer);
}

pykv_status set_last_error(pykv_status status, const std::string& message) {
  last_error = message;
  return status;
}

}  // namespace pykv

const char* pykv_last_error() { return pykv::last_error.c_str(); }
