// An operation as a handler of XLA, by the table of its parameters.
//
// pykv/jax.py says by the attribute "modes", a character for each parameter, where its value is:
//   r  the next buffer                       m  the next buffer, and the next result, which has its memory
//   l  as many of these as attribute pNN     w  the next result after those
//   n  attribute pNN, a number for an array  a  attribute pNN, a plain value          -  nowhere: it is None
#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "op.h"
#include "xla_ffi.h"

namespace pykv::xla {
namespace {

using python::Kind;
using python::Operation;
using python::Value;

// Reads the values of one call in the order of the parameters; throws std::runtime_error where they do not fit.
class Reader {
 public:
  Reader(const CallFrame& frame, DLDevice device);

  void read(int parameter, Kind kind, Value& value);

 private:
  struct List {
    std::vector<DLTensor*> tensors;
    pykv_tensor_list list;
  };

  DLTensor* tensor(int parameter);
  const pykv_tensor_list* list(int parameter);
  int64_t integer(int parameter);
  double number(int parameter);
  const char* string(int parameter);
  const void* attribute(std::string_view name, int type);
  const Scalar& scalar(int parameter);
  DLTensor* view(const Buffer& buffer);
  const Buffer& next(const Arguments& from, int64_t& at);

  const CallFrame& frame_;
  DLDevice device_;
  std::string_view modes_;
  int64_t argument_ = 0, changed_ = 0, made_ = 0;  // of arguments; of results that share memory; of the others
  std::deque<DLTensor> tensors_;                   // addresses stay
  std::deque<float> numbers_;
  std::deque<std::string> strings_;
  std::deque<List> lists_;
};

DLDataType to_dlpack(int dtype) {
  switch (dtype) {
    case 1:
      return {kDLBool, 8, 1};
    case 2:
      return {kDLInt, 8, 1};
    case 3:
      return {kDLInt, 16, 1};
    case 4:
      return {kDLInt, 32, 1};
    case 5:
      return {kDLInt, 64, 1};
    case 6:
      return {kDLUInt, 8, 1};
    case 7:
      return {kDLUInt, 16, 1};
    case 8:
      return {kDLUInt, 32, 1};
    case 9:
      return {kDLUInt, 64, 1};
    case 10:
      return {kDLFloat, 16, 1};
    case 11:
      return {kDLFloat, 32, 1};
    case 12:
      return {kDLFloat, 64, 1};
    case 16:
      return {kDLBfloat, 16, 1};
    case 19:
      return {kDLFloat8_e5m2, 8, 1};
    case 20:
      return {kDLFloat8_e4m3fn, 8, 1};
    default:
      throw std::runtime_error("XLA's element type " + std::to_string(dtype) + " is not supported");
  }
}

// "p07"
std::string name_of(int parameter) {
  std::string name = "p00";
  name[1] += static_cast<char>(parameter / 10);
  name[2] += static_cast<char>(parameter % 10);
  return name;
}

Reader::Reader(const CallFrame& frame, DLDevice device) : frame_(frame), device_(device) {
  const auto* modes = static_cast<const Span*>(attribute("modes", kString));
  modes_ = {modes->data, modes->size};
}

const void* Reader::attribute(std::string_view name, int type) {
  const Attributes& all = frame_.attributes;
  for (int64_t i = 0; i < all.size; ++i)
    if (std::string_view(all.names[i]->data, all.names[i]->size) == name && all.types[i] == type) return all.values[i];
  throw std::runtime_error("attribute " + std::string(name) + " is missing");
}

const Scalar& Reader::scalar(int parameter) {
  return *static_cast<const Scalar*>(attribute(name_of(parameter), kScalar));
}

const Buffer& Reader::next(const Arguments& from, int64_t& at) {
  if (at >= from.size) throw std::runtime_error("fewer buffers than the operation has arrays");
  return *from.buffers[at++];
}

DLTensor* Reader::view(const Buffer& b) {
  return &tensors_.emplace_back(
      DLTensor{b.data, device_, static_cast<int32_t>(b.rank), to_dlpack(b.dtype), b.dims, nullptr, 0});
}

DLTensor* Reader::tensor(int parameter) {
  switch (modes_.at(parameter)) {
    case '-':
      return nullptr;
    case 'r':
      return view(next(frame_.arguments, argument_));
    case 'm':
      next(frame_.arguments, argument_);
      return view(next(frame_.results, changed_));
    case 'w': {
      int64_t at = std::count(modes_.begin(), modes_.end(), 'm') + made_++;
      return view(next(frame_.results, at));
    }
    case 'n': {
      float& value = numbers_.emplace_back(static_cast<float>(number(parameter)));
      static int64_t none[1];
      return &tensors_.emplace_back(DLTensor{&value, {kDLCPU, 0}, 0, {kDLFloat, 32, 1}, none, none, 0});
    }
    default:
      throw std::runtime_error("modes do not fit the operation");
  }
}

const pykv_tensor_list* Reader::list(int parameter) {
  auto& [tensors, list] = lists_.emplace_back();
  for (int64_t n = integer(parameter); n > 0; --n) {
    next(frame_.arguments, argument_);
    tensors.push_back(view(next(frame_.results, changed_)));
  }
  list = {tensors.data(), static_cast<int64_t>(tensors.size())};
  return &list;
}

int64_t Reader::integer(int parameter) { return *static_cast<const int64_t*>(scalar(parameter).value); }

double Reader::number(int parameter) { return *static_cast<const double*>(scalar(parameter).value); }

const char* Reader::string(int parameter) {
  const auto* span = static_cast<const Span*>(attribute(name_of(parameter), kString));
  return strings_.emplace_back(span->data, span->size).c_str();
}

void Reader::read(int parameter, Kind kind, Value& value) {
  switch (kind) {
    case Kind::kWritten:
    case Kind::kRead:
      value.written = tensor(parameter);
      return;
    case Kind::kWrittenList:
      value.list = list(parameter);
      return;
    case Kind::kInt:
      value.integer = integer(parameter);
      return;
    case Kind::kFloat:
      value.number = number(parameter);
      return;
    case Kind::kBool:
      value.truth = integer(parameter) != 0;
      return;
    case Kind::kString:
      value.string = string(parameter);
      return;
    case Kind::kStream:
      return;  // the last one, which is no attribute
  }
}

// Answers the question for metadata; true if that was all.
bool answer_metadata(const CallFrame& frame) {
  const Extension* extension = frame.extensions;
  if (!extension || extension->type != kMetadataExtension) return false;
  Metadata& metadata = *reinterpret_cast<const MetadataExtension*>(extension)->metadata;
  metadata.api_version.major = kMajor;
  metadata.api_version.minor = kMinor;
  metadata.traits = 0;
  return true;
}

Error* make_error(const CallFrame& frame, int code, const char* message) {
  ErrorCreate create{sizeof(ErrorCreate), nullptr, message, code};
  return frame.api->error_create(&create);
}

Error* last_error(const CallFrame& frame, pykv_status status) {
  const int code = status == PYKV_NOT_IMPLEMENTED                            ? kUnimplemented
                   : status == PYKV_VALUE_ERROR || status == PYKV_TYPE_ERROR ? kInvalidArgument
                                                                             : kInternal;
  return make_error(frame, code, pykv_last_error());
}

DLDevice device_of(const CallFrame& frame, DLDeviceType type) {
  if (type == kDLCPU) return {kDLCPU, 0};
  // an older jaxlib does not tell: there the first device is meant
  if (frame.api->struct_size < sizeof(Api)) return {type, 0};
  DeviceOrdinalGet get{sizeof(DeviceOrdinalGet), nullptr, frame.context, 0};
  if (frame.api->device_ordinal_get(&get)) throw std::runtime_error("XLA does not tell the device of the call");
  return {type, get.ordinal};
}

void* stream_of(const CallFrame& frame) {
  StreamGet get{sizeof(StreamGet), nullptr, frame.context, nullptr};
  if (frame.api->stream_get(&get)) throw std::runtime_error("XLA does not tell the stream of the call");
  return get.stream;
}

}  // namespace
}  // namespace pykv::xla

namespace pykv::python {

xla::Error* call_from_xla(const Operation& operation, DLDeviceType type, xla::CallFrame* frame) {
  using namespace xla;
  if (answer_metadata(*frame) || frame->stage != kExecute) return nullptr;
  try {
    Reader reader(*frame, device_of(*frame, type));
    Value values[kMaxParameters + 1];
    for (int i = 0; i < operation.count; ++i) reader.read(i, operation.kinds[i], values[i]);
    values[operation.count].stream = type == kDLCUDA ? stream_of(*frame) : nullptr;
    const pykv_status status = operation.run(values);
    return status == PYKV_OK ? nullptr : last_error(*frame, status);
  } catch (const std::exception& e) {
    return make_error(*frame, kInternal, e.what());
  }
}

}  // namespace pykv::python
