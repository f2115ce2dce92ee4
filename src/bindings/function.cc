#include "function.h"

#include <structmember.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "failure.h"

namespace pykv::python {
namespace {

namespace py = pybind11;

constexpr Py_ssize_t kMaxParameters = 31;

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);  // METH_FASTCALL

struct Parameter {
  PyObject* name;      // interned
  PyObject* fallback;  // its default; null: it is required
  PyObject* convert;   // null, or what makes of a value the one that C takes
};

// Functions live as long as the process, and so does all that they hold.
struct Function {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *dict, *weak_references;
  PyObject* definition;
  Entry entry;
  std::atomic<PyObject*> route;  // who takes the calls; null: `entry`
  std::atomic<PyObject*>
      dispatcher;  // who takes those that `entry` cannot, for their tensors are torch's alone to read
  Parameter* parameters;
  PyObject** left_out;  // for each parameter its default, converted; null: it is required
  Py_ssize_t count, num_positional;
  uint32_t required, converted;  // a bit for each parameter
};

Function* cast(PyObject* object) { return reinterpret_cast<Function*>(object); }

// The definition has no body: all that it does with these arguments is to refuse them, in Python's own words.
PyObject* refuse(const Function* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  PyObject* result = PyObject_Vectorcall(self->definition, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, keywords);
  if (!result) return nullptr;
  Py_DECREF(result);
  PyErr_SetString(PyExc_SystemError, "an operation and its definition take other arguments");
  return nullptr;
}

// As a rule names are interned on both sides, and keywords come in the order of the parameters.
Py_ssize_t find(const Function* self, PyObject* keyword, Py_ssize_t from) {
  for (Py_ssize_t i = from; i < self->count; ++i)
    if (self->parameters[i].name == keyword) return i;
  for (Py_ssize_t i = 0; i < from; ++i)
    if (self->parameters[i].name == keyword) return i;
  for (Py_ssize_t i = 0; i < self->count; ++i)
    if (PyUnicode_Compare(self->parameters[i].name, keyword) == 0) return i;
  return -1;
}

// As the entry, with those values converted that are given and have to be.
PyObject* call_converted(const Function* self, PyObject** values, uint32_t given) {
  PyObject* made[kMaxParameters];
  int num_made = 0;
  bool failed = false;
  for (uint32_t left = given & self->converted; left && !failed; left &= left - 1) {
    const int i = std::countr_zero(left);
    const Parameter& p = self->parameters[i];
    if (values[i] == p.fallback) {
      values[i] = self->left_out[i];
      continue;
    }
    values[i] = PyObject_CallOneArg(p.convert, values[i]);
    failed = !values[i];
    if (!failed) made[num_made++] = values[i];
  }
  PyObject* result = failed ? nullptr : self->entry(nullptr, values, self->count);
  while (num_made > 0) Py_DECREF(made[--num_made]);
  return result;
}

PyObject* call_here(const Function* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  if (PyObject* route = self->route.load(std::memory_order_acquire))
    return PyObject_Vectorcall(route, args, nargsf, keywords);
  const Py_ssize_t num_given = PyVectorcall_NARGS(nargsf), count = self->count;
  if (num_given > self->num_positional) return refuse(self, args, nargsf, keywords);
  PyObject* values[kMaxParameters];
  std::copy_n(args, num_given, values);
  std::copy(self->left_out + num_given, self->left_out + count, values + num_given);
  uint32_t given = (uint32_t{1} << num_given) - 1;
  if (keywords) {
    Py_ssize_t next = num_given;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keywords); ++k) {
      const Py_ssize_t i = find(self, PyTuple_GET_ITEM(keywords, k), next);
      if (i < 0 || (given >> i & 1)) return refuse(self, args, nargsf, keywords);
      values[i] = args[num_given + k];
      given |= uint32_t{1} << i;
      next = i + 1;
    }
  }
  if (self->required & ~given) return refuse(self, args, nargsf, keywords);
  return given & self->converted ? call_converted(self, values, given) : self->entry(nullptr, values, count);
}

PyObject* call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const Function* self = cast(object);
  if (PyObject* result = call_here(self, args, nargsf, keywords)) return result;
  PyObject* dispatcher = self->dispatcher.load(std::memory_order_acquire);
  if (!dispatcher || !PyErr_ExceptionMatches(for_dispatcher)) return nullptr;
  PyErr_Clear();
  return PyObject_Vectorcall(dispatcher, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, keywords);
}

PyObject* repr(PyObject* object) {
  return PyUnicode_FromFormat("<operation %U>",
                              reinterpret_cast<PyFunctionObject*>(cast(object)->definition)->func_name);
}

// As functions of Python do in a class.
PyObject* bind(PyObject* object, PyObject* instance, PyObject*) {
  if (instance && instance != Py_None) return PyMethod_New(object, instance);
  Py_INCREF(object);
  return object;
}

// By its name, as all functions are pickled.
PyObject* reduce(PyObject* object, PyObject*) { return PyObject_GetAttrString(object, "__qualname__"); }

// What took the calls before may still be at it in another thread: it is never let go.
PyObject* set_route(PyObject* object, PyObject* route) {
  Function* self = cast(object);
  if (route == Py_None) route = self->entry ? nullptr : self->definition;
  Py_XINCREF(route);
  self->route.store(route, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject* set_dispatcher(PyObject* object, PyObject* dispatcher) {
  Py_INCREF(dispatcher);
  cast(object)->dispatcher.store(dispatcher, std::memory_order_release);
  Py_RETURN_NONE;
}

PyTypeObject* type = nullptr;

PyTypeObject* make_type() {
  static PyMethodDef methods[] = {
      {"__reduce__", reduce, METH_NOARGS, nullptr},
      {"route", set_route, METH_O, "Sends calls to another callable; None: back to C."},
      {"dispatch", set_dispatcher, METH_O, "Sends calls with tensors that only torch's dispatcher can take elsewhere."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Function, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Function, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
      {Py_tp_methods, methods},
      {Py_tp_members, members},
      {Py_tp_getset, attributes},
      {0, nullptr},
  };
  static PyType_Spec spec = {"pykv._C.Function", sizeof(Function), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  PyObject* made = PyType_FromSpec(&spec);
  if (!made) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(made);
}

// names: of all parameters.  defaults, converters: by name, of those that have one.  entry: None where the definition has
// a body, which then takes the calls.
py::object make_function(py::function definition, py::object entry, py::tuple names, py::ssize_t num_positional,
                         py::dict defaults, py::dict converters) {
  if (names.size() > kMaxParameters) throw py::value_error("an operation has at most 31 parameters");
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) throw py::error_already_set();
  Function* self = cast(object);
  self->vectorcall = call;
  self->definition = definition.inc_ref().ptr();
  self->count = static_cast<Py_ssize_t>(names.size());
  self->num_positional = num_positional;
  self->parameters = new Parameter[names.size()]();
  self->left_out = new PyObject*[names.size()]();
  for (size_t i = 0; i < names.size(); ++i) {
    const py::object name = names[i];
    Parameter& p = self->parameters[i];
    p.name = py::object(name).release().ptr();
    PyUnicode_InternInPlace(&p.name);
    if (converters.contains(name)) {
      p.convert = py::object(converters[name]).release().ptr();
      self->converted |= uint32_t{1} << i;
    }
    if (!defaults.contains(name)) {
      self->required |= uint32_t{1} << i;
      continue;
    }
    p.fallback = py::object(defaults[name]).release().ptr();
    self->left_out[i] = p.convert ? py::handle(p.convert)(py::handle(p.fallback)).release().ptr() : p.fallback;
  }
  if (entry.is_none()) {
    self->route = self->definition;
  } else {
    self->entry = reinterpret_cast<Entry>(reinterpret_cast<void (*)()>(PyCFunction_GetFunction(entry.ptr())));
    if (!self->entry) throw py::error_already_set();
  }
  return py::reinterpret_borrow<py::object>(object);  // the other reference is for ever
}

// Tracers, such as torch.compile, which look up `__call__` in the class and cannot follow C, find a function of Python there.
// Calls never come to it: theirs is the slot, which this leaves as it is.
void set_traced_call(py::function traced) {
#if PY_VERSION_HEX >= 0x030C0000
  const py::object dict = py::reinterpret_steal<py::object>(PyType_GetDict(type));
#else
  const py::object dict = py::reinterpret_borrow<py::object>(type->tp_dict);
#endif
  if (PyDict_SetItemString(dict.ptr(), "__call__", traced.ptr()) != 0) throw py::error_already_set();
  PyType_Modified(type);
}

}  // namespace

void bind_function(py::module_& m) {
  type = make_type();
  m.attr("Function") = py::handle(reinterpret_cast<PyObject*>(type));
  m.def("set_traced_call", set_traced_call, py::arg("traced"));
  m.def("make_function", make_function, py::arg("definition"), py::arg("entry"), py::arg("names"),
        py::arg("num_positional"), py::arg("defaults"), py::arg("converters"));
}

}  // namespace pykv::python
