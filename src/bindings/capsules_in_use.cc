#include "capsules_in_use.h"

#include <deque>
#include <mutex>
#include <utility>

#include "array.h"
#include "unlocked.h"

namespace pykv::python {
namespace {

struct InUse {
  void* mark;  // behind the work
  std::vector<PyObject*> capsules;
};

// Never destroyed: at the end of the process neither Python nor CUDA could be asked any more.
struct Calls {
  std::mutex mutex;  // for Pythons without a GIL
  std::deque<InUse> waiting;
};
Calls& calls() {
  static auto* const all = new Calls;
  return *all;
}

bool is_done(const InUse& call) {
  bool passed = false;
  return pykv_mark_passed(call.mark, &passed) != PYKV_OK || passed;  // after an error of the device nothing runs
}

}  // namespace

void keep_until_done(std::vector<PyObject*> capsules, DLDevice device, void* stream) {
  InUse call{nullptr, std::move(capsules)};
  {
    const Unlocked unlocked;                       // as for launches
    pykv_mark_stream(device, stream, &call.mark);  // no mark: nothing to wait for
  }
  std::vector<InUse> done;
  {
    Calls& all = calls();
    const std::lock_guard lock(all.mutex);
    all.waiting.push_back(std::move(call));
    // calls of one stream are done in their order, those of several mostly
    for (; !all.waiting.empty() && is_done(all.waiting.front()); all.waiting.pop_front())
      done.push_back(std::move(all.waiting.front()));
  }
  for (const InUse& call : done)  // outside of the lock: a producer may run Python
    for (PyObject* capsule : call.capsules) release_capsule(capsule);
}

}  // namespace pykv::python
