// Failures inside the library are exceptions; core/call.h turns them into a status.
#pragma once

#include <exception>
#include <string>

#include "pykv/base.h"

namespace pykv {

class Error : public std::exception {
 public:
  Error(pykv_status status, std::string message) : status_(status), message_(std::move(message)) {}
  pykv_status status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  pykv_status status_;
  std::string message_;
};

// Throws an Error with a printf-formatted message.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(pykv_status status, const char* format, ...);

// Keeps the message for pykv_last_error() of this thread.
pykv_status set_last_error(pykv_status status, const std::string& message);

}  // namespace pykv
