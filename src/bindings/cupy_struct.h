// CuPy's arrays by the fields of their C struct: an attribute costs as much as a whole array of NumPy's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

namespace pykv::python {

// Where in a cupy.ndarray and in its MemoryPointer the fields lie.  They are classes of Cython, whose structs nobody promises:
// each field is found in an array made for that, by its value, and tried with others.
class CupyStruct {
 public:
  struct Fields {
    void* pointer;
    int32_t device;
    int ndim;
    const int64_t *sizes, *strides;  // in bytes
    PyObject* dtype;                 // borrowed
  };

  // False: this array has a memory of its own kind.
  bool read(PyObject* array, Fields& to) const {
    PyObject* memory = at<PyObject*>(array, data_);
    if (Py_TYPE(memory) != memory_type_) return false;
    const auto [sizes, end] = at<Range>(array, shape_);
    to = {at<void*>(memory, pointer_),      at<int32_t>(memory, device_), static_cast<int>(end - sizes), sizes,
          at<Range>(array, strides_).begin, at<PyObject*>(array, dtype_)};
    return true;
  }

  void* current_stream() const;

  // For cupy.ndarray and classes derived from it; null: where the fields lie is not known.
  static const CupyStruct* of(PyTypeObject* type);

 private:
  struct Range {  // a std::vector
    const int64_t *begin, *end;
  };

  template <class T>
  static T at(const void* object, size_t offset) {
    T value;
    std::memcpy(&value, static_cast<const char*>(object) + offset, sizeof value);
    return value;
  }

  explicit CupyStruct(const pybind11::module_& cupy);
  void find(const pybind11::object& array);
  bool fits(const pybind11::object& array) const;

  size_t data_, dtype_, shape_, strides_, pointer_, device_;
  PyTypeObject *array_type_, *memory_type_;
  intptr_t (*stream_)();
};

}  // namespace pykv::python
