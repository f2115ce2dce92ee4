// Groups of tokens into the caches, for operations that do something with them first.  What writes them is compiled once for each
// format, in reshape_and_cache_cpu.cc, and called once for some tokens.
#pragma once

#include <memory>

#include "cache/writes/reshape_and_cache.h"

namespace pykv::PYKV_ISA {

inline constexpr int64_t kGroup = 16;                 // tokens that no two threads share: often a block of the cache
inline constexpr int64_t kBytesPerTask = 128 * 1024;  // less is not worth another thread

class TokenWriter {
 public:
  // What a thread needs.
  struct Buffers {
    virtual ~Buffers() = default;
  };

  virtual ~TokenWriter() = default;
  // Whether a token's only key lies behind its value: both are written in turn then, in whole lines.
  virtual bool writes_entries() const = 0;
  virtual std::unique_ptr<Buffers> buffers() const = 0;
  // Tokens [begin, end).
  virtual void write(Buffers& buffers, int64_t begin, int64_t end) const = 0;
};

// `args` must outlive it.
std::unique_ptr<TokenWriter> token_writer(const ReshapeAndCacheArgs& args, const Reporter& report, bool past_caches);

}  // namespace pykv::PYKV_ISA
