//! pykv's C interface: every function of its headers, and views of arrays to call them with.
//!
//! The headers of the installed pykv say what they mean.  They are read when this crate is built, so that its functions are
//! those of the library.  A program finds the library where its own `build.rs` says:
//!
//! ```ignore
//! println!("cargo:rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_PYKV_LIBDIR").unwrap());
//! ```
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void, CStr};
use std::marker::PhantomData;
use std::ptr;

pub type pykv_status = i32;
pub const PYKV_OK: pykv_status = 0;
pub const PYKV_VALUE_ERROR: pykv_status = 1;
pub const PYKV_TYPE_ERROR: pykv_status = 2;
pub const PYKV_NOT_IMPLEMENTED: pykv_status = 3;
pub const PYKV_RUNTIME_ERROR: pykv_status = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}
pub const CPU: DLDevice = DLDevice { device_type: 1, device_id: 0 };

/// A CUDA device by its number.
pub const fn cuda(device_id: i32) -> DLDevice {
    DLDevice { device_type: 2, device_id }
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

/// Arrays that a call writes, one for each layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pykv_tensor_list {
    pub tensors: *const *mut DLTensor,
    pub size: i64,
}

/// What `pykv_paged_attention` is told beside the arrays that it always needs; `default()` is what NULL means in C.
///
/// `struct_size` tells a newer library which fields this crate knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pykv_paged_attention_options {
    pub struct_size: usize,
    pub cu_query_lens: *const DLTensor,
    pub scale: f64,
    pub causal: bool,
    pub window: i64,
    pub softcap: f64,
    pub alibi_slopes: *const DLTensor,
    pub sinks: *const DLTensor,
    pub kv_cache_dtype: *const c_char,
    pub k_scale: *const DLTensor,
    pub v_scale: *const DLTensor,
    pub batch_invariant: bool,
    pub lse: *mut DLTensor,
    pub workspace: *mut DLTensor,
}

impl Default for pykv_paged_attention_options {
    fn default() -> Self {
        Self {
            struct_size: std::mem::size_of::<Self>(),
            cu_query_lens: ptr::null(),
            scale: f64::NAN,
            causal: true,
            window: 0,
            softcap: 0.0,
            alibi_slopes: ptr::null(),
            sinks: ptr::null(),
            kv_cache_dtype: c"auto".as_ptr(),
            k_scale: ptr::null(),
            v_scale: ptr::null(),
            batch_invariant: false,
            lse: ptr::null_mut(),
            workspace: ptr::null_mut(),
        }
    }
}

include!(concat!(env!("OUT_DIR"), "/functions.rs"));

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
macro_rules! elements {
    ($($kind:ty: $code:expr, $bits:expr;)*) => {$(
        impl Element for $kind {
            const DTYPE: DLDataType = DLDataType { code: $code, bits: $bits, lanes: 1 };
        }
    )*};
}
elements! { i32: 0, 32; i64: 0, 64; u8: 1, 8; f32: 2, 32; Half: 2, 16; BFloat16: 4, 16; bool: 6, 8; }

/// The bits of a float16; no arithmetic.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Half(pub u16);

/// The bits of a bfloat16; no arithmetic.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BFloat16(pub u16);

/// A compact array, borrowed.
pub struct View<'a> {
    tensor: DLTensor,
    _shape: Box<[i64]>, // `tensor` points here: on the heap it stays where it is when the view moves
    _memory: PhantomData<&'a mut ()>,
}

impl<'a> View<'a> {
    /// Host memory, to be read.
    pub fn of<T: Element>(data: &'a [T], shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "the shape does not fit the memory");
        Self::new(data.as_ptr().cast_mut(), shape, CPU)
    }

    /// Host memory, to be written.
    pub fn of_mut<T: Element>(data: &'a mut [T], shape: &[usize]) -> ViewMut<'a> {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "the shape does not fit the memory");
        ViewMut(Self::new(data.as_mut_ptr(), shape, CPU))
    }

    /// Memory of a device, to be read.
    ///
    /// # Safety
    /// It holds that many elements, and lives as long as the view.
    pub unsafe fn on_device<T: Element>(data: *const T, shape: &[usize], device: DLDevice) -> Self {
        Self::new(data.cast_mut(), shape, device)
    }

    /// Memory of a device, to be written.
    ///
    /// # Safety
    /// As of `on_device`, and nothing else uses it meanwhile.
    pub unsafe fn on_device_mut<T: Element>(data: *mut T, shape: &[usize], device: DLDevice) -> ViewMut<'a> {
        ViewMut(Self::new(data, shape, device))
    }

    fn new<T: Element>(data: *mut T, shape: &[usize], device: DLDevice) -> Self {
        let mut shape: Box<[i64]> = shape.iter().map(|&n| n as i64).collect();
        let tensor = DLTensor {
            data: data.cast(),
            device,
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
