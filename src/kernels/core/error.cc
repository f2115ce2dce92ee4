#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/call.h"

namespace pykv {
namespace {

constexpr int kMostBytes = 1024;

thread_local char last_error[kMostBytes + 128];

// Where a text was cut: the bytes of a character of which not all are there go, too.
void drop_half_character(char* text) {
  size_t size = std::strlen(text), first = size;
  while (first > 0 && size - first < 3 && (text[first - 1] & 0xc0) == 0x80) --first;
  if (first == 0) return;
  const unsigned char lead = static_cast<unsigned char>(text[first - 1]);
  const size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  if (size - (first - 1) < wanted) text[first - 1] = '\0';
}

}  // namespace

void fail(pykv_status status, const char* format, ...) {
  char buffer[kMostBytes];
  va_list args;
  va_start(args, format);
  if (std::vsnprintf(buffer, sizeof buffer, format, args) >= kMostBytes) drop_half_character(buffer);
  va_end(args);
  throw Error(status, buffer);
}

pykv_status set_last_error(pykv_status status, const char* op, const char* message) noexcept {
  const int size = std::snprintf(last_error, sizeof last_error, "%s: %s", op, message);
  if (size >= static_cast<int>(sizeof last_error)) drop_half_character(last_error);
  return status;
}

}  // namespace pykv

const char* pykv_last_error() { return pykv::last_error; }
