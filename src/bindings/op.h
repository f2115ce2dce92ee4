// One line for each op: everything a Python call needs is deduced from the C declaration.
//
//   DLTensor*         an array that is written          const DLTensor*   an array that is read, or a number (a scale)
//   pykv_tensor_list  a sequence of written arrays      int64_t, double, bool, const char*      as they are
//   void*             the stream, always last
//
// The functions are positional (METH_FASTCALL); names, defaults and meaning are those of the Python function above them.
#pragma once

#include <array>
#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#include "array.h"
#include "failure.h"
#include "torch_ops.h"
#include "xla.h"

namespace pykv::python {

// The arrays of a call.  Those to which its stream matters are chained: they lie where their arguments do, and nothing is
// allocated.
class Frame {
 public:
  explicit Frame(Failure& at) : at_(at) {}

  void add(Array& array, PyObject* object, bool written) {
    if (object == Py_None) return;
    if (Py_TYPE(object) != type_) {  // as a rule all arrays of a call are of one
      if (!written && PyFloat_CheckExact(object)) return array.set_number(PyFloat_AS_DOUBLE(object));
      type_ = Py_TYPE(object);
      info_ = &type_info(type_);
    }
    if (!array.borrow(object, *info_, streams_, written)) return;
    array.position = at_.position;
    array.next = nullptr;
    *last_ = &array;
    last_ = &array.next;
  }

  // Decides the stream, orders the producers before it and finishes what had to wait for it.
  void* resolve_stream(const StreamChoice& choice) { return first_ ? resolve_streams(choice) : choice.stream; }

  // After the work was enqueued: what came by `__dlpack__` stays until it is done.
  void keep(void* stream) {
    if (first_) keep_capsules(stream);
  }

  bool is_on_host() const { return !first_; }

 private:
  void* resolve_streams(const StreamChoice& choice);
  void keep_capsules(void* stream);

  Failure& at_;
  PyTypeObject* type_ = nullptr;
  const TypeInfo* info_ = nullptr;
  CurrentStreams streams_;
  Array* first_ = nullptr;
  Array** last_ = &first_;
};

// Argument<T>: first `take`, in order, then `get` once the stream is known.  kKind is what Python calls it.
template <class T>
struct Argument;

template <>
struct Argument<DLTensor*> {
  static constexpr const char* kKind = "written";
  Array array;
  void take(Frame& frame, PyObject* object) { frame.add(array, object, true); }
  DLTensor* get() { return array.get(); }
};

template <>
struct Argument<const DLTensor*> {
  static constexpr const char* kKind = "read";
  Array array;
  void take(Frame& frame, PyObject* object) { frame.add(array, object, false); }
  const DLTensor* get() { return array.get(); }
};

template <>
struct Argument<pykv_tensor_list> {
  static constexpr const char* kKind = "written list";
  py::object held;           // another thread may take arrays out of a list while the operation runs
  std::deque<Array> arrays;  // addresses stay
  std::vector<DLTensor*> tensors;
  void take(Frame& frame, PyObject* object) {
    if (!PyList_Check(object) && !PyTuple_Check(object)) throw py::type_error("a list or tuple of arrays is required");
    held = py::reinterpret_steal<py::object>(PySequence_Tuple(object));
    if (!held) throw py::error_already_set();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held.ptr()); ++i)
      frame.add(arrays.emplace_back(), PyTuple_GET_ITEM(held.ptr(), i), true);
  }
  pykv_tensor_list get() {
    for (Array& a : arrays) tensors.push_back(a.get());
    return {tensors.data(), static_cast<int64_t>(tensors.size())};
  }
};

template <>
struct Argument<int64_t> {
  static constexpr const char* kKind = "int";
  int64_t value;
  void take(Frame&, PyObject* object) {
    if (PyLong_CheckExact(object)) {
      value = PyLong_AsLongLong(object);
    } else {
      PyObject* number = PyNumber_Index(object);
      if (!number) throw py::error_already_set();
      value = PyLong_AsLongLong(number);
      Py_DECREF(number);
    }
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
  int64_t get() { return value; }
};

template <>
struct Argument<double> {
  static constexpr const char* kKind = "float";
  double value;
  void take(Frame&, PyObject* object) {
    value = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  }
  double get() { return value; }
};

template <>
struct Argument<bool> {
  static constexpr const char* kKind = "bool";
  bool value;
  void take(Frame&, PyObject* object) {
    const int truth = PyBool_Check(object) ? object == Py_True : PyObject_IsTrue(object);
    if (truth < 0) throw py::error_already_set();
    value = truth != 0;
  }
  bool get() { return value; }
};

template <>
struct Argument<const char*> {
  static constexpr const char* kKind = "str";
  const char* value;
  void take(Frame&, PyObject* object) {
    value = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : nullptr;
    if (!value) throw py::type_error("a string is required, got " + std::string(Py_TYPE(object)->tp_name));
  }
  const char* get() { return value; }
};

template <>
struct Argument<void*> {
  static constexpr const char* kKind = "stream";
  StreamChoice choice;
  void* stream = nullptr;
  void take(Frame&, PyObject* object) {
    if (object != Py_None) choice = stream_from(object);
  }
  void* get() { return stream; }
};

// While an operation runs, others may have the GIL.  Letting go of it and taking it again costs as much as reading three
// arrays: it is kept where no other thread of Python exists, and the operation waits for nobody, as on the CPU, where its
// own threads know nothing of Python.  (A launch on a GPU may wait for a host function in its stream that wants the GIL.)
class Unlocked {
 public:
  explicit Unlocked(const Frame& frame)
      : thread_(frame.is_on_host() && is_only_thread() ? nullptr : PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (thread_) PyEval_RestoreThread(thread_);
  }

 private:
  static bool is_only_thread() {
#ifdef Py_GIL_DISABLED
    return false;  // collectors of garbage wait for threads that are not let go
#else
    // new ones come first in the list, and cannot go before they had the GIL
    PyThreadState* own = PyThreadState_Get();
    return PyInterpreterState_ThreadHead(own->interp) == own && !PyThreadState_Next(own);
#endif
  }

  PyThreadState* thread_;
};

template <auto kOp, class Signature = decltype(kOp)>
struct Entry;

template <auto kOp, class... Args>
struct Entry<kOp, pykv_status (*)(Args...)> {
  static inline const char* name = "";
  static py::tuple kinds() { return py::make_tuple(Argument<Args>::kKind...); }

  static PyObject* call(PyObject*, PyObject* const* objects, Py_ssize_t count) {
    Failure at{name, -1};
    try {
      return run(objects, count, at, std::index_sequence_for<Args...>());
    } catch (...) {
      raise_failure(at);
      return nullptr;
    }
  }

  template <size_t... I>
  static PyObject* run(PyObject* const* objects, Py_ssize_t count, Failure& at, std::index_sequence<I...>) {
    if (count != sizeof...(Args))
      throw py::type_error("takes " + std::to_string(sizeof...(Args)) + " arguments, got " + std::to_string(count));
    Frame frame(at);
    std::tuple<Argument<Args>...> arguments;
    ((at.position = I, std::get<I>(arguments).take(frame, objects[I])), ...);
    auto& last = std::get<sizeof...(Args) - 1>(arguments);
    last.stream = frame.resolve_stream(last.choice);
    at.position = -1;
    const pykv_status status = [&] {
      const Unlocked unlocked(frame);
      return kOp(std::get<I>(arguments).get()...);
    }();
    if (status != PYKV_OK) {
      raise_status(status);
      return nullptr;
    }
    frame.keep(last.stream);
    Py_RETURN_NONE;
  }
};

class Module {
 public:
  explicit Module(py::module_& module) : module_(module) {
    module_.attr("ops") = ops_;
    module_.attr("xla_handlers") = xla_handlers_;
  }

  template <auto kOp>
  void def(const char* name) {
    Entry<kOp>::name = name;
    // CPython keeps the definition's address for the life of the process
    static PyMethodDef definition{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Entry<kOp>::call)),
                                  METH_FASTCALL, nullptr};
    PyObject* function = PyCFunction_NewEx(&definition, nullptr, nullptr);
    if (!function) throw py::error_already_set();
    module_.add_object(name, py::reinterpret_steal<py::object>(function));
    ops_[name] = Entry<kOp>::kinds();
    torch_ops::Handler<kOp>::operation = {name, torch_ops::Handler<kOp>::call, {}};
    torch_ops::add(torch_ops::Handler<kOp>::operation);
    xla_handlers_[name] = py::make_tuple(handler<kOp, kDLCPU>(), handler<kOp, kDLCUDA>());
  }

 private:
  template <auto kOp, DLDeviceType kDevice>
  static py::capsule handler() {
    return py::capsule(reinterpret_cast<void*>(xla::Handler<kOp, kDevice>::call), "xla._CUSTOM_CALL_TARGET");
  }

  py::module_& module_;
  py::dict ops_;           // name -> what each parameter is, from which pykv._schema makes the signatures of frameworks
  py::dict xla_handlers_;  // name -> (for the CPU, for CUDA), for pykv.jax
};

}  // namespace pykv::python

using pykv::python::Module;
