// Calls of Python's: how arguments become what C takes.
#include "op.h"

#include <cstring>
#include <forward_list>
#include <new>
#include <string>
#include <vector>

#include "frame.h"
#include "torch_ops.h"
#include "unlocked.h"

namespace pykv::python {
namespace {

int64_t integer_from(PyObject* object) {
  int64_t value;
  if (PyLong_CheckExact(object)) {
    value = PyLong_AsLongLong(object);
  } else {
    PyObject* number = PyNumber_Index(object);
    if (!number) throw py::error_already_set();
    value = PyLong_AsLongLong(number);
    Py_DECREF(number);
  }
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

double number_from(PyObject* object) {
  const double value = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Integers and arrays of one element will do; what merely is not empty, such as "false", will not.
bool truth_from(PyObject* object) {
  if (PyBool_Check(object)) return object == Py_True;
  const PyNumberMethods* const methods = Py_TYPE(object)->tp_as_number;
  if (!methods || !methods->nb_bool || PyFloat_Check(object) || PyComplex_Check(object) || object == Py_None)
    throw py::type_error("a bool is required, got " + std::string(Py_TYPE(object)->tp_name));
  const int truth = PyObject_IsTrue(object);
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

const char* string_from(PyObject* object) {
  if (!PyUnicode_Check(object)) {
    throw py::type_error("a string is required, got " + std::string(Py_TYPE(object)->tp_name));
  }
  Py_ssize_t length;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (!text) throw py::error_already_set();  // half of a surrogate pair
  if (std::strlen(text) != static_cast<size_t>(length)) throw py::value_error("must not hold a null character");
  return text;
}

// The arguments of a call: first all are taken, in order, then finished, once the stream is known.
class Arguments {
 public:
  explicit Arguments(Failure& at) : frame_(at) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (Array* a = arrays(); a != end_; ++a) a->~Array();
  }

  void take(const Operation& operation, PyObject* const* objects, Failure& at) {
    const Kind* const kinds = operation.kinds;
    const int count = operation.count;
    Array* next = arrays();
    for (int i = 0; i < count; ++i) {
      at.position = i;
      const Kind kind = kinds[i];
      PyObject* const object = objects[i];
      if (kind > Kind::kRead) {
        take(kind, object, values_[i]);
      } else if (object == Py_None) {
        values_[i].written = nullptr;
      } else {
        Array& array = *new (next) Array;
        end_ = ++next;
        frame_.add(array, object, kind == Kind::kWritten);
        values_[i].written = array.get();
      }
    }
    at.position = count;
    StreamChoice choice;
    if (objects[count] != Py_None) choice = stream_from(objects[count]);
    stream_ = values_[count].stream = frame_.resolve_stream(choice);
    for (List& list : lists_) list.finish();
    at.position = -1;
  }

  const Value* values() const { return values_; }
  bool are_on_host() const { return frame_.is_on_host(); }
  void keep() { frame_.keep(stream_); }

 private:
  struct List {
    py::object held;            // another thread may take arrays out of a list while the operation runs
    std::vector<Array> arrays;  // never grows: addresses stay
    std::vector<DLTensor*> tensors;
    pykv_tensor_list list;
    void finish() {
      for (Array& a : arrays) tensors.push_back(a.get());
      list = {tensors.data(), static_cast<int64_t>(tensors.size())};
    }
  };

  Array* arrays() { return reinterpret_cast<Array*>(storage_); }

  [[gnu::noinline]] void take(Kind kind, PyObject* object, Value& value) {
    switch (kind) {
      case Kind::kWrittenList:
        value.list = take_list(object);
        return;
      case Kind::kInt:
        value.integer = integer_from(object);
        return;
      case Kind::kFloat:
        value.number = number_from(object);
        return;
      case Kind::kBool:
        value.truth = truth_from(object);
        return;
      case Kind::kString:
        value.string = string_from(object);
        return;
      default:  // take() does arrays, and the stream
        return;
    }
  }

  const pykv_tensor_list* take_list(PyObject* object) {
    if (!PyList_Check(object) && !PyTuple_Check(object)) throw py::type_error("a list or tuple of arrays is required");
    List& list = lists_.emplace_front();
    list.held = py::reinterpret_steal<py::object>(PySequence_Tuple(object));
    if (!list.held) throw py::error_already_set();
    const Py_ssize_t count = PyTuple_GET_SIZE(list.held.ptr());
    list.arrays = std::vector<Array>(count);
    for (Py_ssize_t i = 0; i < count; ++i)
      if (PyObject* item = PyTuple_GET_ITEM(list.held.ptr(), i); item != Py_None)
        frame_.add(list.arrays[i], item, true);
    return &list.list;
  }

  Frame frame_;
  Array* end_ = arrays();
  void* stream_ = nullptr;
  std::forward_list<List> lists_;
  Value values_[kMaxParameters + 1];
  alignas(Array) std::byte storage_[kMaxParameters * sizeof(Array)];  // as many as there are: no more is ever touched
};

// Whether others may have the GIL while an operation runs.  Letting go of it and taking it again costs as much as reading
// three arrays: it is kept where no other thread of Python exists, and the operation waits for nobody, as on the CPU,
// where its own threads know nothing of Python.  (A launch on a GPU may wait for a host function in its stream that wants
// the GIL.)
bool others_may_run(bool on_host) {
#ifdef Py_GIL_DISABLED
  return true;  // collectors of garbage wait for threads that are not let go
#else
  if (!on_host) return true;
  // new threads come first in the list, and cannot go before they had the GIL
  PyThreadState* own = PyThreadState_Get();
  return PyInterpreterState_ThreadHead(own->interp) != own || PyThreadState_Next(own);
#endif
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kWritten:
      return "written";
    case Kind::kRead:
      return "read";
    case Kind::kWrittenList:
      return "written list";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kBool:
      return "bool";
    case Kind::kString:
      return "str";
    case Kind::kStream:
      return "stream";
  }
  return "";
}

py::capsule capsule_of(xla::Error* (*handler)(xla::CallFrame*)) {
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

PyObject* call_from_python(const Operation& operation, PyObject* const* objects, Py_ssize_t count) {
  Failure at{operation.name, -1};
  try {
    if (count != operation.count + 1)
      throw py::type_error("takes " + std::to_string(operation.count + 1) + " arguments, got " + std::to_string(count));
    Arguments arguments(at);
    arguments.take(operation, objects, at);
    const pykv_status status = [&] {
      const Unlocked unlocked(others_may_run(arguments.are_on_host()));
      return operation.run(arguments.values());
    }();
    if (status != PYKV_OK) {
      raise_status(status);
      return nullptr;
    }
    arguments.keep();
    Py_RETURN_NONE;
  } catch (...) {
    raise_failure(at);
    return nullptr;
  }
}

Module::Module(PyObject* module)
    : module_(module), ops_(py::dict().release().ptr()), xla_handlers_(py::dict().release().ptr()) {
  py::setattr(module_, "ops", ops_);
  py::setattr(module_, "xla_handlers", xla_handlers_);
}

void Module::add(Operation& operation, const char* name) {
  operation.name = name;
  // CPython keeps the definition's address for the life of the process
  auto* definition = new PyMethodDef{
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(operation.from_python)), METH_FASTCALL, nullptr};
  const py::object function = py::reinterpret_steal<py::object>(PyCFunction_NewEx(definition, nullptr, nullptr));
  if (!function) throw py::error_already_set();
  py::setattr(module_, name, function);
  py::tuple kinds(operation.count + 1);
  for (int i = 0; i <= operation.count; ++i) kinds[i] = py::str(name_of(operation.kinds[i]));
  py::reinterpret_borrow<py::dict>(ops_)[name] = kinds;
  torch_ops::add(operation);
  py::reinterpret_borrow<py::dict>(xla_handlers_)[name] =
      py::make_tuple(capsule_of(operation.from_xla), capsule_of(operation.from_xla_cuda));
}

}  // namespace pykv::python
