# The CUDA toolkit, optional. Sets PERIGEE_HAS_CUDA; without it the modules marked CUDA consist of their cuda_absent.cc.
set(PERIGEE_CUDA AUTO CACHE STRING "build the CUDA backend: AUTO (where nvcc is found), ON, OFF")
set(PERIGEE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures to build for: 80, 90a, 120")

set(PERIGEE_HAS_CUDA OFF)
if(NOT PERIGEE_CUDA STREQUAL OFF)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(PERIGEE_HAS_CUDA ON)
  elseif(PERIGEE_CUDA STREQUAL ON)
    message(FATAL_ERROR "PERIGEE_CUDA=ON and no nvcc found: put it on the PATH or set CMAKE_CUDA_COMPILER")
  endif()
endif()

if(PERIGEE_HAS_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${PERIGEE_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  # CMake 3.25 does not know how to ask this nvcc for C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  find_package(CUDAToolkit REQUIRED)
  if(CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
endif()

# perigee_check_cuda_arch(ARCH file.cu ...): target check_cuda_ARCH compiles the files for another architecture and
# throws the result away.
function(perigee_check_cuda_arch ARCH)
  add_library(check_cuda_${ARCH} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(check_cuda_${ARCH} PROPERTIES CUDA_ARCHITECTURES ${ARCH})
  target_link_libraries(check_cuda_${ARCH} PRIVATE perigee_options CUDA::cudart_static)
endfunction()
