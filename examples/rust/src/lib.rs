//! The part of pykv's C interface that a decode step needs, declared by hand.
//!
//! `pykv/base.h`, `pykv/cache.h`, `pykv/attention.h` and `dlpack/dlpack.h` say what it means; other operations are declared
//! in the same way.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void, CStr};
use std::marker::PhantomData;
use std::ptr;

pub type pykv_status = i32;
pub const PYKV_OK: pykv_status = 0;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64, // null: compact
    pub byte_offset: u64,
}

extern "C" {
    pub fn pykv_last_error() -> *const c_char;
    pub fn pykv_version() -> i32;
    pub fn pykv_reshape_and_cache_flash(
        key: *const DLTensor,
        value: *const DLTensor,
        key_cache: *mut DLTensor,
        value_cache: *mut DLTensor,
        slot_mapping: *const DLTensor,
        kv_cache_dtype: *const c_char,
        k_scale: *const DLTensor,
        v_scale: *const DLTensor,
        stream: *mut c_void,
    ) -> pykv_status;
    pub fn pykv_paged_attention(
        out: *mut DLTensor,
        query: *const DLTensor,
        key_cache: *const DLTensor,
        value_cache: *const DLTensor,
        block_tables: *const DLTensor,
        seq_lens: *const DLTensor,
        cu_query_lens: *const DLTensor,
        scale: f64,
        causal: bool,
        window: i64,
        softcap: f64,
        alibi_slopes: *const DLTensor,
        sinks: *const DLTensor,
        kv_cache_dtype: *const c_char,
        k_scale: *const DLTensor,
        v_scale: *const DLTensor,
        batch_invariant: bool,
        lse: *mut DLTensor,
        workspace: *mut DLTensor,
        stream: *mut c_void,
    ) -> pykv_status;
}

/// The message of a call that did not return `PYKV_OK`.
pub fn check(status: pykv_status) -> Result<(), String> {
    if status == PYKV_OK {
        return Ok(());
    }
    // SAFETY: never null, and valid until the next failing call of this thread.
    Err(unsafe { CStr::from_ptr(pykv_last_error()) }.to_string_lossy().into_owned())
}

/// Element types that have a dtype.
pub trait Element {
    const DTYPE: DLDataType;
}
impl Element for f32 {
    const DTYPE: DLDataType = DLDataType { code: 2, bits: 32, lanes: 1 };
}
impl Element for i32 {
    const DTYPE: DLDataType = DLDataType { code: 0, bits: 32, lanes: 1 };
}
impl Element for i64 {
    const DTYPE: DLDataType = DLDataType { code: 0, bits: 64, lanes: 1 };
}

/// A compact array in host memory, borrowed.
pub struct View<'a> {
    tensor: DLTensor,
    _shape: Box<[i64]>, // `tensor` points here: on the heap it stays where it is when the view moves
    _memory: PhantomData<&'a mut ()>,
}

impl<'a> View<'a> {
    /// To be read.
    pub fn of<T: Element>(data: &'a [T], shape: &[usize]) -> Self {
        Self::new(data.as_ptr().cast_mut(), data.len(), shape)
    }

    /// To be written.
    pub fn of_mut<T: Element>(data: &'a mut [T], shape: &[usize]) -> ViewMut<'a> {
        ViewMut(Self::new(data.as_mut_ptr(), data.len(), shape))
    }

    fn new<T: Element>(data: *mut T, len: usize, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), len, "the shape does not fit the memory");
        let mut shape: Box<[i64]> = shape.iter().map(|&n| n as i64).collect();
        let tensor = DLTensor {
            data: data.cast(),
            device: DLDevice { device_type: 1, device_id: 0 }, // kDLCPU
            ndim: shape.len() as i32,
            dtype: T::DTYPE,
            shape: shape.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        Self { tensor, _shape: shape, _memory: PhantomData }
    }

    pub fn as_ptr(&self) -> *const DLTensor {
        &self.tensor
    }
}

/// A view that may be written.
pub struct ViewMut<'a>(View<'a>);

impl ViewMut<'_> {
    pub fn as_ptr(&self) -> *const DLTensor {
        self.0.as_ptr()
    }

    pub fn as_mut_ptr(&mut self) -> *mut DLTensor {
        &mut self.0.tensor
    }
}
