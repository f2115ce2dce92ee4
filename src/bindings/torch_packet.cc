// torch.ops.pykv.f for calls from Python: the way to torch's dispatcher without torch's matching of arguments.
//
// Of such a call's cost half is a frame of Python and a search for each argument by its name, spelt anew.  A packet of this
// class does that once for all, makes words of the arguments and gives them to the dispatcher by torch's stable shim.  Where
// torch looks at the objects of Python themselves (subclasses, modes, traces), where an argument is not quite of the
// parameter's type, and where the dispatcher fails, the call is torch's own.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <atomic>
#include <bit>
#include <string>
#include <utility>

#include "signature.h"
#include "torch_ops.h"
#include "torch_shim.h"
#include "unlocked.h"

namespace pykv::python::torch_ops {
namespace {

// from the first packet on
PyTypeObject *type = nullptr, *tensor_type = nullptr, *parameter_type = nullptr;

// What of an operation its packet holds; for ever.
struct Callable {
  const Operation* operation;
  std::string name;  // with the namespace
  PyObject* original;
  Signature signature;
  std::atomic<bool> is_direct = true;
};

// Behind the fields that OpOverloadPacket's objects have.
struct Fields {
  vectorcallfunc vectorcall;
  Callable* callable;
};

Py_ssize_t base_size = 0;

Fields& fields_of(PyObject* packet) { return *reinterpret_cast<Fields*>(reinterpret_cast<char*>(packet) + base_size); }

void let_go(Kind kind, bool optional, Word word) {
  if (optional) {
    if (!word) return;
    word = unbox(word);
  }
  if (kind == Kind::kWritten || kind == Kind::kRead) shim->release(reinterpret_cast<void*>(word));
  if (kind == Kind::kString) shim->release_string(reinterpret_cast<void*>(word));
}

// A value that is nothing but what the parameter's type says.
bool encode(Kind kind, bool optional, PyObject* value, Word& word) {
  if (optional && value == Py_None) {
    word = 0;
    return true;
  }
  void* handle = nullptr;
  switch (kind) {
    case Kind::kWritten:
    case Kind::kRead: {
      if (Py_TYPE(value) != tensor_type && Py_TYPE(value) != parameter_type) return false;
      void* tensor = shim->tensor_of(value);
      if (!tensor || !shim->hold(tensor, &handle)) return false;
      word = reinterpret_cast<Word>(handle);
      break;
    }
    case Kind::kInt: {
      if (!PyLong_CheckExact(value)) return false;
      int overflow;
      word = std::bit_cast<Word>(int64_t{PyLong_AsLongLongAndOverflow(value, &overflow)});
      if (overflow) return false;
      break;
    }
    case Kind::kFloat:
      if (!PyFloat_CheckExact(value)) return false;
      word = std::bit_cast<Word>(PyFloat_AS_DOUBLE(value));
      break;
    case Kind::kBool:
      if (!PyBool_Check(value)) return false;
      word = value == Py_True;
      break;
    case Kind::kString: {
      if (!PyUnicode_CheckExact(value)) return false;
      Py_ssize_t length;
      const char* text = PyUnicode_AsUTF8AndSize(value, &length);
      if (!text) {
        PyErr_Clear();
        return false;
      }
      if (!shim->make_string(text, length, &handle)) return false;
      word = reinterpret_cast<Word>(handle);
      break;
    }
    default:
      return false;
  }
  if (optional) word = reinterpret_cast<Word>(new Word(word));
  return true;
}

bool encode_all(const Callable& callable, PyObject** values, Word* words) {
  const Kind* kinds = callable.operation->kinds;
  const uint32_t optional = callable.operation->rules->optional;
  for (Py_ssize_t i = 0; i < callable.signature.count; ++i) {
    if (encode(kinds[i], optional >> i & 1, values[i], words[i])) continue;
    while (i-- > 0) let_go(kinds[i], optional >> i & 1, words[i]);
    return false;
  }
  return true;
}

PyObject* call(PyObject* packet, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const Callable& callable = *fields_of(packet).callable;
  PyObject* values[kMaxParameters];
  Word words[kMaxParameters];
  uint32_t given;
  if (!callable.is_direct.load(std::memory_order_relaxed) || shim->calls_are_watched() ||
      !callable.signature.match(args, PyVectorcall_NARGS(nargsf), keywords, values, given) ||
      !encode_all(callable, values, words))
    return PyObject_Vectorcall(callable.original, args, nargsf, keywords);

  Caller caller(*callable.operation);
  const bool went_well = [&] {
    const Unlocked unlocked;
    waiting = &caller;
    const bool done = shim->call(callable.name.c_str(), words);
    waiting = nullptr;
    return done;
  }();
  for (int i = 0; i < caller.num_tensors; ++i) shim->release(caller.tensors[i]);
  if (caller.error) {
    try {
      std::rethrow_exception(caller.error);
    } catch (const py::builtin_exception& e) {
      e.set_error();
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
  }
  if (!went_well) return PyObject_Vectorcall(callable.original, args, nargsf, keywords);  // it says why
  Py_RETURN_NONE;
}

PyTypeObject* make_type(PyTypeObject* base) {
  base_size = base->tp_basicsize;
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, base_size + static_cast<Py_ssize_t>(offsetof(Fields, vectorcall)), READONLY,
       nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {0, nullptr},
  };
  static PyType_Spec spec = {"pykv._C.OpOverloadPacket", static_cast<int>(base_size + sizeof(Fields)), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  const py::tuple bases = py::make_tuple(py::handle(reinterpret_cast<PyObject*>(base)));
  PyObject* made = PyType_FromSpecWithBases(&spec, bases.ptr());
  if (!made) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(made);
}

PyTypeObject* type_named(const char* module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(py::object(py::module_::import(module).attr(name)).release().ptr());
}

bool connect(const py::object& packet) {
  if (type) return true;
  shim = TorchShim::get();
  if (!shim || !shim->can_call()) return false;
  tensor_type = type_named("torch", "Tensor");
  parameter_type = type_named("torch.nn", "Parameter");
  type = make_type(Py_TYPE(packet.ptr()));
  return true;
}

bool can_encode(const Operation& operation) {
  for (int i = 0; i < operation.count; ++i)
    if (operation.kinds[i] == Kind::kString && !shim->can_make_strings()) return false;
  return true;
}

// A packet as the one that torch has made for an operation whose kernel is C; that one, where there can be no other.
py::object make_packet(py::object packet, const std::string& name, py::tuple names, py::ssize_t num_positional,
                       py::dict defaults) try {
  const Operation& operation = operation_of(name);
  if (names.size() > kMaxParameters || !connect(packet) || !can_encode(operation)) return packet;
  py::object made = py::reinterpret_steal<py::object>(type->tp_new(type, py::tuple().ptr(), nullptr));
  if (!made) throw py::error_already_set();
  made.attr("__dict__").attr("update")(packet.attr("__dict__"));
  auto* callable = new Callable{&operation, "pykv::" + name, py::object(packet.attr("op")).release().ptr(), {}};
  callable->signature.set(names, num_positional, defaults);
  fields_of(made.ptr()) = {call, callable};
  return made;
} catch (const py::error_already_set&) {  // a packet of another kind
  return packet;
}

// Whether calls of a packet of ours may spare torch's own way.
void call_directly(py::object packet, bool directly) {
  if (Py_TYPE(packet.ptr()) == type)
    fields_of(packet.ptr()).callable->is_direct.store(directly, std::memory_order_relaxed);
}

}  // namespace

void bind_packet(py::module_& m) {
  m.def("torch_packet", make_packet, py::arg("packet"), py::arg("name"), py::arg("names"), py::arg("num_positional"),
        py::arg("defaults"));
  m.def("call_directly", call_directly, py::arg("packet"), py::arg("directly"));
}

}  // namespace pykv::python::torch_ops
