/* A C99 program that knows nothing but the headers and the library. */
#include <math.h>
#include <pykv/kernels.h>
#include <stdio.h>
#include <string.h>

static DLTensor vector(float* data, int64_t* shape, int ndim) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape; /* strides NULL: compact */
  return t;
}

int main(void) {
  float x[2][3] = {{3, 0, 4}, {1, 1, 1}}, w[3] = {1, 2, 1}, y[2][3];
  int64_t rows[2] = {2, 3}, columns[1] = {3};
  DLTensor input = vector(&x[0][0], rows, 2), weight = vector(w, columns, 1), out = vector(&y[0][0], rows, 2);
  if (pykv_version() / 10000 != PYKV_VERSION_MAJOR) return 1;
  if (pykv_rms_norm(&out, &input, &weight, 0.0, NULL) != PYKV_OK) {
    fprintf(stderr, "%s\n", pykv_last_error());
    return 2;
  }
  if (fabsf(y[0][0] - 3 / sqrtf(25.0f / 3)) > 1e-6f || fabsf(y[1][1] - 2) > 1e-6f) return 3;
  columns[0] = 2;
  if (pykv_rms_norm(&out, &input, &weight, 0.0, NULL) != PYKV_VALUE_ERROR) return 4;
  if (strcmp(pykv_last_error(), "rms_norm: weight: dimension 0 must equal hidden_size = 3, got shape [2]") != 0)
    return 5;
  puts("ok");
  return 0;
}
