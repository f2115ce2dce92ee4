// An operation as a kernel of torch's dispatcher, by the table of its parameters.
//
// torch calls kernels of C through its stable shim: void kernel(words, num_inputs, num_outputs), a word of 64 bits for each
// argument of the schema, in the encodings of torch 2.10 whatever the version of torch.  A kernel owns what its words refer
// to, runs without the GIL and knows nothing of Python, except where it raises.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <exception>
#include <string>

#include "op.h"
#include "torch_shim.h"

namespace pykv::python::torch_ops {

namespace py = pybind11;

using Word = uint64_t;

// What the schema and the Python definition say of the parameters.
struct Rules {
  uint32_t optional = 0;           // bits of those whose word is the address of another one, or null
  uint32_t must_be_positive = 0;   // of numbers where C takes 0 for None
  Word none[kMaxParameters] = {};  // what C takes for None
};

// A call that torch_packet.cc has made of a call of Python, and which is blocked in the dispatcher on this thread: the
// kernel leaves it what costs less once the GIL is held again, and errors, which torch would not hand through.
struct Caller {
  explicit Caller(const Operation& o) : operation(o) {}
  const Operation& operation;
  std::exception_ptr error;
  std::array<void*, kMaxParameters> tensors;  // to be released
  int num_tensors = 0;
};
extern constinit thread_local Caller* waiting;

extern constinit const TorchShim* shim;  // from the first kernel or packet on

// What an argument is, out of its optional, which torch made by `new`.
inline Word unbox(Word boxed) {
  auto* box = reinterpret_cast<Word*>(boxed);
  const Word word = *box;
  delete box;
  return word;
}

void add(Operation& operation);
Operation& operation_of(const std::string& name);

// For Python: implement_in_torch().
void bind(py::module_& m);
// For Python: torch_packet() and call_directly(), in torch_packet.cc.
void bind_packet(py::module_& m);

}  // namespace pykv::python::torch_ops
