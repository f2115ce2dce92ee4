// Devices and streams for code that is compiled without CUDA headers.
#pragma once

#include "core/launch.h"

namespace pykv {

int device_count();  // 0 without a driver
int num_sms(int device);
bool overlaps_kernels(int device);    // compute capability 9.0 and later: cuda/dependent.cuh
bool has_warpgroups(int device);      // it and the machine code for it: cuda/wgmma.cuh
const char* device_note(int device);  // pykv_device_note

// Makes `device` current and returns the one that was; leave_device goes back.
int enter_device(int device);
void leave_device(int previous);

bool is_capturing(void* stream);

// The error word of a device: device memory that lives as long as the process.
ErrorWord* error_word(int device);
// Waits for the device, reads its error word and clears it.
ErrorWord take_error_word(int device);

void stream_wait(int device, void* stream, void* producer);

// pykv_mark_stream, pykv_mark_passed
void* mark_stream(int device, void* stream);
bool mark_passed(void* mark);

}  // namespace pykv
