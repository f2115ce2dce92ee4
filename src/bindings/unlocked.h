// Letting go of Python's lock (the GIL) while C works.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace pykv::python {

// Others may have the GIL while this lives.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  // Keeps the GIL unless `wanted`.
  explicit Unlocked(bool wanted) : thread_(wanted ? PyEval_SaveThread() : nullptr) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (thread_) take_back();
  }

 private:
  // An interpreter that ends lets no other thread have the GIL again.  Before Python 3.14 it unwinds the thread's stack
  // instead, by pthread_exit: the frames above would then give arrays back without the GIL.  So the thread waits here
  // for the end of the process, as it does in 3.14.
  void take_back() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      for (;;) pause();
    }
  }

  PyThreadState* thread_;
};

}  // namespace pykv::python
