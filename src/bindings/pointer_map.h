// A cache keyed by the address of something that lives for ever: read on every call, added to a few times in a process.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace pykv::python {

// Readers take no lock, with or without a GIL.  Entries never move and never go; a key that comes when the map is full is
// looked into anew each time, and nothing is to be kept alive for it.
template <class Value>
class PointerMap {
 public:
  const Value* find(const void* key) const {
    for (uint32_t i = slot(key), n = 0; n < kSize; i = (i + 1) % kSize, ++n) {
      const void* found = entries_[i].key.load(std::memory_order_acquire);
      if (found == key) return &entries_[i].value;
      if (!found) return nullptr;
    }
    return nullptr;
  }

  // keep(): called once for a key that is added, so that what lies there stays.
  template <class Keep>
  const Value& add(const void* key, const Value& value, Keep&& keep) {
    const std::lock_guard lock(mutex_);
    if (const Value* known = find(key)) return *known;  // another thread was quicker
    for (uint32_t i = slot(key), n = 0; n < kSize; i = (i + 1) % kSize, ++n) {
      if (entries_[i].key.load(std::memory_order_relaxed)) continue;
      keep();
      entries_[i].value = value;
      entries_[i].key.store(key, std::memory_order_release);
      return entries_[i].value;
    }
    thread_local Value spare;
    return spare = value;
  }

 private:
  static constexpr uint32_t kSize = 256;

  struct Entry {
    std::atomic<const void*> key = nullptr;
    Value value{};
  };

  // objects of one kind are aligned alike: the low bits say nothing
  static uint32_t slot(const void* key) {
    return static_cast<uint32_t>((reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15u >> 40) % kSize;
  }

  Entry entries_[kSize];
  std::mutex mutex_;
};

}  // namespace pykv::python
