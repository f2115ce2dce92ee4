// XLA's FFI in C: the parts of its ABI (xla/ffi/api/c_api.h of jaxlib, version 0.1 and later) that a handler reads.
//
// Declared here, so that no jaxlib is needed to build and one build serves all of them: the structs only ever grow at
// their ends, which `struct_size` tells.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pykv::xla {

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};
inline constexpr int kMajor = 0, kMinor = 1;

// What a handler is asked for before it is called for the first time.
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;
struct Context;

struct ErrorCreate {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};
inline constexpr int kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13;

struct StreamGet {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;
};

struct DeviceOrdinalGet {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t ordinal;
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void (*error_get_message)(void*);
  void (*error_destroy)(void*);
  Error* (*handler_register)(void*);
  Error* (*stream_get)(StreamGet*);
  void* others[12];
  Error* (*device_ordinal_get)(DeviceOrdinalGet*);  // since 0.2; ask struct_size
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Span {
  const char* data;
  size_t size;
};

struct Scalar {
  int dtype;
  void* value;
};

enum AttributeType : int { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Arguments {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  const int* types;
  Buffer** buffers;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  const int* types;
  Span** names;
  void** values;  // Scalar* or Span*
};

enum Stage : int { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int stage;
  Arguments arguments, results;
  Attributes attributes;
};

}  // namespace pykv::xla
