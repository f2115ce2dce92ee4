# Finds dlpack/dlpack.h 1.2 or later.  Sets PYKV_DLPACK_INCLUDE_DIR, and PYKV_TVM_FFI_HEADER where the header of tvm-ffi is
# beside it.
#
# pip's build environment brings it with the wheel of apache-tvm-ffi; elsewhere any include path will do.
if(NOT PYKV_DLPACK_INCLUDE_DIR)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util, pathlib
spec = importlib.util.find_spec("tvm_ffi")
print(pathlib.Path(spec.origin).parent / "include" if spec else "", end="")
]]
      OUTPUT_VARIABLE _hint ERROR_QUIET)
  endif()
  find_path(_found dlpack/dlpack.h HINTS ${_hint} NO_CACHE)
  if(_found)
    # pip's build environment is gone afterwards: a copy keeps one path, so that the next build finds its objects valid
    set(PYKV_DLPACK_INCLUDE_DIR "${CMAKE_BINARY_DIR}/dlpack-include")
    configure_file("${_found}/dlpack/dlpack.h" "${PYKV_DLPACK_INCLUDE_DIR}/dlpack/dlpack.h" COPYONLY)
    if(EXISTS "${_found}/tvm/ffi/c_api.h")
      configure_file("${_found}/tvm/ffi/c_api.h" "${PYKV_DLPACK_INCLUDE_DIR}/tvm/ffi/c_api.h" COPYONLY)
    endif()
  endif()
endif()
if(NOT EXISTS "${PYKV_DLPACK_INCLUDE_DIR}/dlpack/dlpack.h")
  message(FATAL_ERROR "pykv: dlpack/dlpack.h was not found. `pip install apache-tvm-ffi` brings it, "
    "or set PYKV_DLPACK_INCLUDE_DIR to the folder that holds dlpack/.")
endif()
file(STRINGS "${PYKV_DLPACK_INCLUDE_DIR}/dlpack/dlpack.h" _lines REGEX "#define DLPACK_M(AJOR|INOR)_VERSION")
string(REGEX REPLACE ".*MAJOR_VERSION ([0-9]+).*MINOR_VERSION ([0-9]+).*" "\\1.\\2" _version "${_lines}")
if(_version VERSION_LESS 1.2)
  message(FATAL_ERROR "pykv: DLPack 1.2 or later is needed, ${PYKV_DLPACK_INCLUDE_DIR} has ${_version}")
endif()
set(PYKV_TVM_FFI_HEADER OFF)
if(EXISTS "${PYKV_DLPACK_INCLUDE_DIR}/tvm/ffi/c_api.h")
  set(PYKV_TVM_FFI_HEADER ON)
endif()
