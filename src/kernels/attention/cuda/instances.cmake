# The kernels' instances: a file for each family and kind of cache element, made of instance.cu.in.
# They join _cuda.
set(_element_f16 "Element16<half>")
set(_element_bf16 "Element16<bf16>")
set(_element_e4m3 "Element8<KvFormat::kE4M3>")
set(_element_e5m2 "Element8<KvFormat::kE5M2>")
set(_element_int8 "Element8<KvFormat::kInt8>")
set(_element_nvfp4 "ElementNvfp4")

# its header, its function, and the kinds of elements that it takes
function(attention_instances _header _function)
  foreach(_kind IN LISTS ARGN)
    set(_element ${_element_${_kind}})
    get_filename_component(_folder ${_header} DIRECTORY)
    string(REPLACE "launch_" "" _name ${_function})
    set(_file ${CMAKE_CURRENT_BINARY_DIR}/src/kernels/attention/cuda/${_folder}/${_name}_${_kind}.cu)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/instance.cu.in ${_file} @ONLY)
    list(APPEND _cuda ${_file})
  endforeach()
  set(_cuda ${_cuda} PARENT_SCOPE)
endfunction()

attention_instances(generic/mma.cuh launch_mma f16 bf16 e4m3 e5m2 int8 nvfp4)
attention_instances(decode/launch.cuh launch_decode f16 bf16 e4m3 e5m2 int8 nvfp4)
attention_instances(verify/launch.cuh launch_verify f16 bf16 e4m3 e5m2 int8)
attention_instances(decode/tokens.cuh launch_tokens f16 bf16 e4m3 nvfp4)
attention_instances(verify/launch.cuh launch_verify_clusters f16 bf16 e4m3)
attention_instances(prefill/kernel.cuh launch_prefill f16 bf16)
attention_instances(prefill/invariant.cuh launch_prefill_invariant f16 bf16)
