// One line for each op, which CMake makes of the headers: everything a call needs is deduced from the C declaration.
//
// What is compiled for each op is a table of these kinds and five functions of a line.  The callers, which read arguments by
// the table, are compiled once: call_from_python() in op.cc, call_from_torch() in torch_ops.cc, call_from_xla() in xla.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kinds.h"

struct _object;  // PyObject: the families' files need no more of Python

namespace pykv::xla {
struct CallFrame;
struct Error;
}  // namespace pykv::xla

namespace pykv::python {

namespace torch_ops {
struct Rules;
}

struct Operation {
  const Kind* kinds;  // of the parameters, and the stream's
  int count;          // of the parameters: values[count] is the stream
  uint32_t arrays;    // a bit for each parameter
  uint32_t strings;
  pykv_status (*run)(const Value* values);

  _object* (*from_python)(_object*, _object* const* objects, ptrdiff_t count);  // METH_FASTCALL
  void (*from_torch)(uint64_t* words, uint64_t num_inputs, uint64_t num_outputs);
  xla::Error* (*from_xla)(xla::CallFrame* frame);
  xla::Error* (*from_xla_cuda)(xla::CallFrame* frame);

  const char* name = "";
  const torch_ops::Rules* rules = nullptr;  // once torch knows the operation
};

_object* call_from_python(const Operation& operation, _object* const* objects, ptrdiff_t count);
void call_from_torch(const Operation& operation, uint64_t* words);
xla::Error* call_from_xla(const Operation& operation, DLDeviceType type, xla::CallFrame* frame);

template <auto kOp>
struct Entry : Callee<kOp> {
  using Callee<kOp>::kKinds, Callee<kOp>::kCount, Callee<kOp>::run;

  template <class Is>
  static constexpr uint32_t bits(Is is) {
    uint32_t found = 0;
    for (int i = 0; i < kCount; ++i) found |= uint32_t{is(kKinds[i])} << i;
    return found;
  }

  static _object* from_python(_object*, _object* const* objects, ptrdiff_t count) {
    return call_from_python(operation, objects, count);
  }
  static void from_torch(uint64_t* words, uint64_t, uint64_t) { call_from_torch(operation, words); }
  static xla::Error* from_xla(xla::CallFrame* frame) { return call_from_xla(operation, kDLCPU, frame); }
  static xla::Error* from_xla_cuda(xla::CallFrame* frame) { return call_from_xla(operation, kDLCUDA, frame); }

  static inline constinit Operation operation{kKinds.data(),
                                              kCount,
                                              bits([](Kind k) { return k == Kind::kWritten || k == Kind::kRead; }),
                                              bits([](Kind k) { return k == Kind::kString; }),
                                              run,
                                              from_python,
                                              from_torch,
                                              from_xla,
                                              from_xla_cuda};
};

class Module {
 public:
  explicit Module(_object* module);

  template <auto kOp>
  void def(const char* name) {
    add(Entry<kOp>::operation, name);
  }

 private:
  void add(Operation& operation, const char* name);

  _object* module_;
  _object* ops_;           // name -> what each parameter is, from which pykv._schema makes the signatures of frameworks
  _object* xla_handlers_;  // name -> (for the CPU, for CUDA), for pykv.jax
};

}  // namespace pykv::python

using pykv::python::Module;
