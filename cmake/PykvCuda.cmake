# Decides whether CUDA kernels are built, finds a CUDA compiler and enables the CUDA language.  Sets PYKV_WITH_CUDA,
# CMAKE_CUDA_ARCHITECTURES, and PYKV_BUILD_NOTE: what was decided, why, and how to have the other.
#
#   PYKV_CUDA = AUTO    ON if PYKV_CUDA_ARCHS is set or the machine has an NVIDIA GPU or driver, else OFF
#             = ON      nvcc from PyPI if the Python environment holds it, else the system's; none is an error
#             = SYSTEM  the system's nvcc
#             = OFF     CPU only
#   PYKV_CUDA_ARCHS     e.g. "80-real;90a-real"; default: the GPUs of this machine, else 80-real, 90a-real and PTX of 90
#
# -DCMAKE_CUDA_COMPILER and CUDACXX always win.
set(PYKV_CUDA AUTO CACHE STRING "AUTO, ON, SYSTEM or OFF")
set(PYKV_CUDA_ARCHS "" CACHE STRING "CUDA architectures; empty: the GPUs of this machine")
set(PYKV_WITH_CUDA OFF)
find_package(Python COMPONENTS Interpreter QUIET)
if(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" ${CMAKE_CURRENT_LIST_DIR}/../packaging/cuda_choice.py "${PYKV_CUDA}" "${PYKV_CUDA_ARCHS}"
    OUTPUT_VARIABLE _choice ERROR_VARIABLE _error ERROR_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
  if(_failed)
    message(FATAL_ERROR "pykv: ${_error}")
  endif()
  list(GET _choice 0 _mode)
  list(GET _choice 1 _reason)
else()
  string(TOUPPER "${PYKV_CUDA}" _mode)
  set(_reason "PYKV_CUDA=${_mode}")
  if(NOT _mode MATCHES "^(ON|SYSTEM|OFF)$")
    message(FATAL_ERROR "pykv: no Python was found, which looks for a GPU: set PYKV_CUDA to ON, SYSTEM or OFF")
  endif()
endif()
if(_mode STREQUAL OFF)
  set(PYKV_BUILD_NOTE
    "built for the CPU alone (${_reason}). PYKV_CUDA=ON in the environment of the installation builds CUDA kernels")
  message(STATUS "pykv: ${PYKV_BUILD_NOTE}")
  return()
endif()

# The wheels lay a toolkit into site-packages/nvidia/cu13 with which neither nvcc nor CMake can link as it lies: nvcc looks
# for lib64/ (there is only lib/), FindCUDAToolkit wants libcudart.so (there is only libcudart.so.13).  A tree of links in
# the build folder heals both, writes nothing into site-packages, and keeps one path over pip's throw-away environments.
function(pykv_link_pypi_toolkit out)
  set(${out} "" PARENT_SCOPE)
  if(NOT Python_EXECUTABLE)
    return()
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
for base in spec.submodule_search_locations if spec else ():
    for root in sorted(pathlib.Path(base).glob("cu[0-9]*"), reverse=True):
        if (root / "bin" / "nvcc").is_file() and (root / "nvvm" / "bin" / "cicc").is_file():
            print(root, end="")
            raise SystemExit
]]
    OUTPUT_VARIABLE _root ERROR_QUIET)
  if(NOT _root)
    return()
  endif()
  set(_tree "${CMAKE_BINARY_DIR}/cuda-toolkit")
  file(REMOVE_RECURSE "${_tree}")
  file(MAKE_DIRECTORY "${_tree}/bin" "${_tree}/lib64")
  foreach(_pair bin:bin lib:lib64)
    string(REPLACE ":" ";" _pair ${_pair})
    list(GET _pair 0 _from)
    list(GET _pair 1 _to)
    file(GLOB _files "${_root}/${_from}/*")
    foreach(_file IN LISTS _files)
      get_filename_component(_name "${_file}" NAME)
      file(CREATE_LINK "${_file}" "${_tree}/${_to}/${_name}" SYMBOLIC)
      if(_name MATCHES "^(lib[^.]+\\.so)\\.[0-9]+$")
        set(_plain "${CMAKE_MATCH_1}")
        if(NOT EXISTS "${_root}/${_from}/${_plain}")
          file(CREATE_LINK "${_file}" "${_tree}/${_to}/${_plain}" SYMBOLIC)
        endif()
      endif()
    endforeach()
  endforeach()
  foreach(_dir include nvvm)
    file(CREATE_LINK "${_root}/${_dir}" "${_tree}/${_dir}" SYMBOLIC)
  endforeach()
  file(CREATE_LINK lib64 "${_tree}/lib" SYMBOLIC)
  message(STATUS "pykv: CUDA compiler from PyPI: ${_root}")
  set(${out} "${_tree}" PARENT_SCOPE)
endfunction()

# Compute capabilities of the GPUs here, e.g. "90a-real" for a Hopper chip.
function(pykv_local_architectures out)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE _caps ERROR_QUIET RESULT_VARIABLE _failed)
  set(_found "")
  if(_failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" _caps "${_caps}")
    foreach(_cap IN LISTS _caps)
      string(REPLACE "." "" _cap ${_cap})
      if(_cap GREATER_EQUAL 90)
        string(APPEND _cap a) # the features of this very chip
      endif()
      list(APPEND _found ${_cap}-real)
    endforeach()
    list(REMOVE_DUPLICATES _found)
  endif()
  set(${out} "${_found}" PARENT_SCOPE)
endfunction()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  if(PYKV_CUDA_ARCHS)
    string(REGEX REPLACE "[, ]+" ";" CMAKE_CUDA_ARCHITECTURES "${PYKV_CUDA_ARCHS}")
  else()
    pykv_local_architectures(CMAKE_CUDA_ARCHITECTURES)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 90-virtual)
    endif()
  endif()
endif()

# The cache of an earlier configure may name the tree of links: always lay it again.
if((NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND NOT _mode STREQUAL SYSTEM)
   OR "${CMAKE_CUDA_COMPILER}" STREQUAL "${CMAKE_BINARY_DIR}/cuda-toolkit/bin/nvcc")
  pykv_link_pypi_toolkit(_tree)
  if(_tree)
    set(CMAKE_CUDA_COMPILER "${_tree}/bin/nvcc" CACHE FILEPATH "nvcc from PyPI" FORCE)
    set(CUDAToolkit_ROOT "${_tree}")
  endif()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "pykv: CUDA kernels are to be built (${_reason}), and no CUDA compiler was found. Choose one of\n"
    "  PYKV_CUDA=ON      nvcc from PyPI: `pip install .` brings it; by hand: pip install 'cuda-toolkit[nvcc,cccl]==13.0.3.0'\n"
    "  PYKV_CUDA=SYSTEM  the toolkit of this machine: put its nvcc on PATH or set CUDACXX\n"
    "  PYKV_CUDA=OFF     CPU only")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "pykv: nvcc 12.8 or later is needed, ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}. "
    "PYKV_CUDA=ON takes nvcc from PyPI, PYKV_CUDA=OFF builds for the CPU only.")
endif()
set(PYKV_WITH_CUDA ON)
string(REPLACE ";" "," PYKV_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
set(PYKV_BUILD_NOTE "built with CUDA kernels for ${PYKV_CUDA_ARCHITECTURES} (${_reason}). PYKV_CUDA=OFF in the environment of \
the installation builds for the CPU alone, PYKV_CUDA_ARCHS says for which GPUs")
message(STATUS "pykv: ${PYKV_BUILD_NOTE}, with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
