#include "function.h"

#include <structmember.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "failure.h"
#include "signature.h"

namespace pykv::python {
namespace {

namespace py = pybind11;

using Positional = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);  // METH_FASTCALL

struct Parameter {     // null: it has no such thing
  PyObject* fallback;  // its default, of those that are converted
  PyObject* convert;   // what makes of a value the one that C takes
};

// Functions live as long as the process, and so does all that they hold.
struct Function {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *dict, *weak_references;
  PyObject* definition;
  Positional entry;
  std::atomic<PyObject*> route;       // who takes the calls; null: `entry`
  std::atomic<PyObject*> dispatcher;  // of those that `entry` cannot take: of tensors that only torch can read
  Signature signature;                // defaults are converted
  Parameter* parameters;
  uint32_t converted;  // a bit for each parameter
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

// As the entry, with those values converted that are given and have to be.
PyObject* call_converted(const Function* self, PyObject** values, uint32_t given) {
  PyObject* made[kMaxParameters];
  int num_made = 0;
  bool failed = false;
  for (uint32_t left = given & self->converted; left && !failed; left &= left - 1) {
    const int i = std::countr_zero(left);
    const Parameter& p = self->parameters[i];
    if (values[i] == p.fallback) {
      values[i] = self->signature.left_out[i];
      continue;
    }
    values[i] = PyObject_CallOneArg(p.convert, values[i]);
    failed = !values[i];
    if (!failed) made[num_made++] = values[i];
  }
  PyObject* result = failed ? nullptr : self->entry(nullptr, values, self->signature.count);
  while (num_made > 0) Py_DECREF(made[--num_made]);
  return result;
}

PyObject* call_here(const Function* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  if (PyObject* route = self->route.load(std::memory_order_acquire))
    return PyObject_Vectorcall(route, args, nargsf, keywords);
  const Signature& signature = self->signature;
  PyObject* values[kMaxParameters];
  uint32_t given;
  if (!signature.match(args, PyVectorcall_NARGS(nargsf), keywords, values, given))
    return refuse(self, args, nargsf, keywords);
  return given & self->converted ? call_converted(self, values, given) : self->entry(nullptr, values, signature.count);
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
  Signature& signature = self->signature;
  signature.set(names, num_positional, defaults);
  self->parameters = new Parameter[names.size()]();
  for (size_t i = 0; i < names.size(); ++i) {
    if (!converters.contains(names[i])) continue;
    Parameter& p = self->parameters[i];
    p.convert = py::object(converters[names[i]]).release().ptr();
    p.fallback = signature.left_out[i];
    self->converted |= uint32_t{1} << i;
    if (p.fallback) signature.left_out[i] = py::handle(p.convert)(py::handle(p.fallback)).release().ptr();
  }
  if (entry.is_none()) {
    self->route = self->definition;
  } else {
    self->entry = reinterpret_cast<Positional>(reinterpret_cast<void (*)()>(PyCFunction_GetFunction(entry.ptr())));
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
