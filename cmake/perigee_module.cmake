# perigee_module(NAME [CUDA] [LOOPS] [FUZZED] [DEPS a b ...] [LINK lib ...] [ROOMS x y ...] [HOST f.cc ...]
#                [SOURCES f.cc ...] [TESTS t_test.cc ...])
#
# A folder is a library: every *.cc of it except *_test.cc becomes perigee_NAME, every *_test.cc joins the one test
# program NAME_test. DEPS are the only other modules whose headers it may include (tools/tidy.py reads this line and
# rejects any other); `base` is implied. LINK are third-party libraries. SOURCES and TESTS name the files where two
# modules share a folder. ROOMS are subfolders that belong to the module. A CUDA module also takes its *.cu; where no
# toolkit is, it is its cuda_absent.cc and the files HOST, whose tests are then its only ones. A module of LOOPS works on
# tensors or masks and is compiled with -O3; all others with -O2, which takes a tenth less time. With sanitizers these are
# -O2 and the preset's -O1. In a build for fuzzing the branches of FUZZED modules are counted; in loops over tensors that
# costs more than all else.
function(perigee_module NAME)
  cmake_parse_arguments(ARG "CUDA;LOOPS;FUZZED" "" "DEPS;LINK;ROOMS;HOST;SOURCES;TESTS" ${ARGN})
  if(ARG_SOURCES OR ARG_TESTS)
    set(sources ${ARG_SOURCES})
    set(tests ${ARG_TESTS})
  else()
    set(sources)
    foreach(room "" ${ARG_ROOMS})
      file(GLOB found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${room}/*.cc)
      list(APPEND sources ${found})
    endforeach()
    set(tests ${sources})
    list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
    list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  endif()
  set(links ${ARG_LINK})
  if(ARG_CUDA AND PERIGEE_HAS_CUDA)
    list(FILTER sources EXCLUDE REGEX "/cuda_absent\\.cc$")
    foreach(room "" ${ARG_ROOMS})
      file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${room}/*.cu)
      list(APPEND sources ${kernels})
    endforeach()
    list(APPEND links CUDA::cudart_static)
  elseif(ARG_CUDA)
    list(FILTER sources INCLUDE REGEX "/cuda_absent\\.cc$")
    list(APPEND sources ${ARG_HOST})
    string(REPLACE ".cc" "_test.cc" tests "${ARG_HOST}")
  endif()
  foreach(dep ${ARG_DEPS})
    list(APPEND links perigee_${dep})
  endforeach()
  if(NOT NAME STREQUAL base)
    list(APPEND links perigee_base)
  endif()
  if(sources)
    add_library(perigee_${NAME} STATIC ${sources})
    target_link_libraries(perigee_${NAME} PUBLIC perigee_options ${links})
    if(NOT ARG_LOOPS)
      target_compile_options(perigee_${NAME} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O2>)
    elseif(PERIGEE_SANITIZE)  # at -O1, clang calls the operators of vectors and iterators
      target_compile_options(perigee_${NAME} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O2>)
    endif()
    if(PERIGEE_FUZZ AND ARG_FUZZED)
      target_compile_options(perigee_${NAME} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
    endif()
    perigee_precompile_headers(perigee_${NAME} library ${PERIGEE_COMMON_HEADERS})
  else()
    add_library(perigee_${NAME} INTERFACE)
    target_link_libraries(perigee_${NAME} INTERFACE perigee_options ${links})
  endif()
  if(PERIGEE_TESTS AND tests)
    add_executable(${NAME}_test ${tests})
    target_link_libraries(${NAME}_test PRIVATE perigee_${NAME} GTest::gtest GTest::gtest_main)
    perigee_compile_fast(${NAME}_test)
    add_test(NAME ${NAME} COMMAND ${NAME}_test WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set_tests_properties(${NAME} PROPERTIES LABELS unit TIMEOUT 1800)
    if(NAME MATCHES "^(base|server|router)$")  # whose tests have deadlines
      set_tests_properties(${NAME} PROPERTIES RUN_SERIAL ON)
    endif()
  endif()
endfunction()

# A fifth of a library's compile time, and a third of a test's, is these headers: the first target of a KIND reads them
# for all. A source includes what it uses all the same, since the builds with clang go without. GCC 12 then warns of its
# own std::string, in which it takes a short string's buffer for all there is.
set(PERIGEE_COMMON_HEADERS <algorithm> <array> <atomic> <chrono> <functional> <memory> <mutex> <optional> <span> <string>
  <string_view> <thread> <unordered_map> <variant> <vector> <fmt/core.h>)
function(perigee_precompile_headers TARGET KIND)
  if(PERIGEE_SANITIZE)
    return()
  endif()
  target_compile_options(${TARGET} PRIVATE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds$<SEMICOLON>-Wno-stringop-overflow$<SEMICOLON>-Wno-stringop-overread>)
  get_property(reader GLOBAL PROPERTY perigee_${KIND}_headers)
  if(reader)
    target_precompile_headers(${TARGET} REUSE_FROM ${reader})
  else()
    set_property(GLOBAL PROPERTY perigee_${KIND}_headers ${TARGET})
    target_precompile_headers(${TARGET} PRIVATE ${ARGN})
  endif()
endfunction()

# Tests take longer to compile than to run: -O1 takes two thirds of the time of -O3, and with sanitizers -O0 half of that
# of -O1 (FORTIFY, which the sanitizers go without, wants at least -O1).
function(perigee_compile_fast TARGET)
  if(PERIGEE_SANITIZE)
    target_compile_options(${TARGET} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  else()
    target_compile_options(${TARGET} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
    perigee_precompile_headers(${TARGET} test <gtest/gtest.h> ${PERIGEE_COMMON_HEADERS})
  endif()
endfunction()

# Compiles the given files for one instruction set; they are entered only after a run-time check of the processor.
function(perigee_isa ISA)
  if(ISA STREQUAL avx512)
    set(flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mavx2 -mfma -mf16c)
  elseif(ISA STREQUAL amx)
    set(flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mavx2 -mfma -mf16c -mamx-tile -mamx-bf16)
  elseif(ISA STREQUAL avx2)
    set(flags -mavx2 -mfma -mf16c)
  else()
    message(FATAL_ERROR "unknown instruction set ${ISA}")
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${flags};-fno-stack-protector"
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()
