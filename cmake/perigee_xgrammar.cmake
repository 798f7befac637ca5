# xgrammar: the grammar engine of src/grammar, built once for all build folders from its source package on PyPI.
#
# The package is fetched at configure time, checked against its hash, and built in .deps as a static library with the
# default g++ and its own flags, whatever the preset: sanitizers see our side of the edge only. Delete .deps to build it
# again. PERIGEE_XGRAMMAR_PACKAGE names the file where there is no network.
set(version 0.2.8)
set(url https://files.pythonhosted.org/packages/03/0f/29f521535729be740779c2c98b630ef6607cf28be9b669895dd2b821ff63/xgrammar-${version}.tar.gz)
set(hash 8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80)
set(PERIGEE_XGRAMMAR_PACKAGE "" CACHE FILEPATH "xgrammar-${version}.tar.gz, if it is not to be fetched")

set(deps ${CMAKE_SOURCE_DIR}/.deps)
set(source ${deps}/xgrammar-${version}-2)  # the number of what is changed in it below
if(NOT EXISTS ${source}/CMakeLists.txt)
  set(package ${PERIGEE_XGRAMMAR_PACKAGE})
  if(NOT package)
    set(package ${deps}/xgrammar-${version}.tar.gz)
    message(STATUS "fetching xgrammar ${version}")
    file(DOWNLOAD ${url} ${package} EXPECTED_HASH SHA256=${hash} TLS_VERIFY ON STATUS fetched)
    if(NOT fetched MATCHES "^0;")
      message(FATAL_ERROR "cannot fetch ${url} (${fetched}): set PERIGEE_XGRAMMAR_PACKAGE to a copy of the file")
    endif()
  endif()
  file(SHA256 ${package} found)
  if(NOT found STREQUAL hash)
    message(FATAL_ERROR "${package} has the SHA-256 ${found}, expected ${hash}")
  endif()
  # Unpacked beside its place and moved, so that an interrupted configure leaves nothing half there.
  file(ARCHIVE_EXTRACT INPUT ${package} DESTINATION ${deps}/unpacking)
  function(change file from to)
    set(path ${deps}/unpacking/xgrammar-${version}/cpp/${file})
    file(READ ${path} text)
    string(REPLACE "${from}" "${to}" changed "${text}")
    if(changed STREQUAL text)
      message(FATAL_ERROR "xgrammar ${version} is not as expected: ${file} has no ${from}")
    endif()
    file(WRITE ${path} "${changed}")
  endfunction()
  # Its merging of states takes states for equal that are not: ((b)+|[ab]|([ab]){1,3}) took aaaa.
  set(merging "FSMWithStartEnd FSMWithStartEnd::MergeEquivalentStates(int max_result_num_states) const {\n")
  change(fsm.cc "${merging}" "${merging}  if (max_result_num_states >= 0) return Copy();\n")
  # A parser keeps flags of all states for each rule that it comes to: rules times states bytes, of which each place of a
  # grammar is compiled with one. A state belongs to one rule, so one list of all states is enough.
  foreach(file earley_parser.h earley_parser.cc)
    change(${file} "fsm_state_flags_cache_[rule_id]" "fsm_state_flags_cache_[0]")
  endforeach()
  file(RENAME ${deps}/unpacking/xgrammar-${version} ${source})
endif()

# Its default configuration turns the Python bindings on, over any -D; ours is read instead. Without LTO, clang's linker
# reads the library too; -O1 compiles in two thirds of the time of -O3.
set(built ${source}-build)
if(NOT EXISTS ${built}/config.cmake)
  file(WRITE ${built}/config.cmake "set(XGRAMMAR_BUILD_PYTHON_BINDINGS OFF)\n")
endif()
set(launcher)
if(CCACHE)
  set(launcher "-DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_COMMAND}$<SEMICOLON>-E$<SEMICOLON>env$<SEMICOLON>CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}$<SEMICOLON>CCACHE_NOHASHDIR=1$<SEMICOLON>${CCACHE}")
endif()
add_custom_command(
  OUTPUT ${built}/libxgrammar.a
  COMMAND ${CMAKE_COMMAND} -G Ninja -S ${source} -B ${built} -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=g++
    -DCMAKE_CXX_FLAGS_RELEASE=-DNDEBUG
    "-DCMAKE_CXX_FLAGS=-O1 -fno-lto -fvisibility=hidden -fvisibility-inlines-hidden" ${launcher}
  COMMAND ${CMAKE_COMMAND} --build ${built} --target xgrammar
  COMMENT "Building xgrammar ${version}" VERBATIM)
add_custom_target(perigee_xgrammar_build DEPENDS ${built}/libxgrammar.a)

# Its inner headers too: src/grammar/closing.h needs the parser's states.
add_library(perigee_xgrammar INTERFACE)
add_dependencies(perigee_xgrammar perigee_xgrammar_build)
target_include_directories(perigee_xgrammar SYSTEM INTERFACE ${source}/include ${source}/cpp ${source}/3rdparty/picojson
  ${source}/3rdparty/dlpack/include)
target_compile_definitions(perigee_xgrammar INTERFACE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
target_link_libraries(perigee_xgrammar INTERFACE ${built}/libxgrammar.a Threads::Threads)
