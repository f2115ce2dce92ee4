/* pykv: conventions shared by all operations.
 *
 * Arrays are `DLTensor`s (https://dmlc.github.io/dlpack): borrowed for the length of the call, never owned or freed here.
 * `DLTensor*` is written by the call, `const DLTensor*` is read.  Strides are honoured, also NULL ones (compact).  All
 * arrays of a call lie on one device: kDLCPU (and kDLCUDAHost, taken as CPU memory) or kDLCUDA (and kDLCUDAManaged).
 * Arrays on kDLExtDev stand for arrays that do not exist yet: the call checks its arguments, and that is all it does.
 * An array that is written shares no memory with another one of the call, unless the function's comment allows it.  Two
 * parts of one allocation that do not overlap are always right.  An array without elements may have any data pointer.
 *
 * Names in shapes ([num_tokens, hidden_size]) are sizes that have to agree within a call; "..." is any number of dimensions;
 * f32, f16, bf16 are float32, float16 and bfloat16.  What may be NULL is said; everything else must be there.
 *
 * A shape, a stride, a device or an option that does not fit is PYKV_VALUE_ERROR, an element type that does not fit or an
 * array that is missing PYKV_TYPE_ERROR, and pykv_last_error() names the argument, what was wanted and what came.  A number
 * among the options (double, or a float32 array of no dimensions on the host in place of a larger one) must not be NaN, but
 * where the function's comment says what NAN means; a double must be finite in fp32, but for bounds and thresholds.  What
 * arrays hold is not looked at.
 *
 * Every operation checks its arguments on the host first and touches nothing if they are wrong.  On CUDA it then enqueues
 * its work on `stream` (a cudaStream_t; NULL is the default stream) and returns: no synchronisation, and every call can be
 * captured in a CUDA graph.  On the CPU it returns when the work is done, and `stream` is not looked at.
 *
 * Ids inside arrays (slots, block ids, lengths, positions) cannot be checked before a launch.  One that is out of range is
 * skipped (writes) or treated as masked (reads); memory outside the arrays is never touched.  On the CPU the call then
 * returns PYKV_VALUE_ERROR; on CUDA the first such id is kept by the device until pykv_check_errors() reports it, or by
 * every call itself (which then synchronises) if PYKV_CHECK=sync is in the environment.
 *
 * All functions are thread-safe.
 *
 * Example, an array of C and the version that runs:
 *
 *   float data[2][4] = {{1, 2, 3, 4}};
 *   int64_t shape[] = {2, 4};
 *   DLTensor x = {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}; // NULL: compact; 0: data is the first element
 *   if (pykv_gelu_new(&x, &x, NULL) != PYKV_OK) puts(pykv_last_error());
 *   if (pykv_version() < 100) puts("older than 0.1.0");
 */
#ifndef PYKV_BASE_H_
#define PYKV_BASE_H_

#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PYKV_VERSION_MAJOR 0
#define PYKV_VERSION_MINOR 1
#define PYKV_VERSION_PATCH 0

#ifdef __cplusplus
#define PYKV_API extern "C" __attribute__((visibility("default")))
#else
#define PYKV_API __attribute__((visibility("default")))
#endif

typedef enum pykv_status {
  PYKV_OK = 0,
  PYKV_VALUE_ERROR = 1,     /* a shape, a value, a device or a layout is wrong       */
  PYKV_TYPE_ERROR = 2,      /* an element type is wrong, or an array is missing      */
  PYKV_NOT_IMPLEMENTED = 3, /* right, but not supported by this build or this device */
  PYKV_RUNTIME_ERROR = 4    /* CUDA or the operating system failed                   */
} pykv_status;

/* A list of arrays that the call writes, one for each layer. */
typedef struct pykv_tensor_list {
  DLTensor* const* tensors;
  int64_t size;
} pykv_tensor_list;

/* What went wrong in the last call of this thread that returned other than PYKV_OK: "op: argument: wanted, got".  Never
 * NULL; valid until the next failing call of the thread. */
PYKV_API const char* pykv_last_error(void);

/* Version of the library that runs, e.g. 100 for 0.1.0 (major * 10000 + minor * 100 + patch). */
PYKV_API int32_t pykv_version(void);

/* Whether the library was built with CUDA kernels, and for which architectures ("90a-real" or "" without CUDA). */
PYKV_API bool pykv_has_cuda(void);
PYKV_API const char* pykv_cuda_architectures(void);

/* Whether the CUDA kernels were built, why, and how to have it otherwise, for people: "built for the CPU alone (...). ...". */
PYKV_API const char* pykv_build_note(void);

/* What this build lacks for a CUDA device, for people: the kernels that were made for its architecture.  "" if nothing, and
 * for a device that does not exist. */
PYKV_API const char* pykv_device_note(int32_t device);

/* Number of CUDA devices that can be used: 0 on a machine without a driver. */
PYKV_API int32_t pykv_cuda_device_count(void);

/* Reports and clears the first out-of-range id that a call on this CUDA device met.  Synchronises the device.  Returns
 * PYKV_VALUE_ERROR if there was one; PYKV_OK for the CPU, whose calls report at once. */
PYKV_API pykv_status pykv_check_errors(DLDevice device);

/* Makes `stream` wait for what was enqueued on `producer` so far.  An error inside a graph capture. */
PYKV_API pykv_status pykv_stream_wait(DLDevice device, void* stream, void* producer);

/* A mark behind what was enqueued on `stream` so far: NULL inside a graph capture, where nothing runs yet.  For memory that
 * may be used again only when the work on it is done.  pykv_mark_passed() tells whether it is, without waiting; a mark that
 * has passed is gone.  NULL has passed. */
PYKV_API pykv_status pykv_mark_stream(DLDevice device, void* stream, void** mark);
PYKV_API pykv_status pykv_mark_passed(void* mark, bool* passed);

/* Threads that CPU operations use: PYKV_NUM_THREADS in the environment, else the CPUs that the process may run on. */
PYKV_API int32_t pykv_get_num_threads(void);
PYKV_API void pykv_set_num_threads(int32_t num_threads);

#endif /* PYKV_BASE_H_ */
