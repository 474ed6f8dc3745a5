# libtenure-dist.so, its MPI plug-in libtenure-mpi.so, and the tests that run under mpirun.
#
# libtenure-dist needs neither NCCL nor MPI: NCCL is loaded at run time and its interface is
# declared in dist/nccl_abi.h, so AUTO is the same as ON but does not ask that it is here. The
# plug-in is compiled against one MPI, as MPI libraries have no binary interface in common.

# Sets TENURE_MPI_ENABLED in the caller.
function(tenure_find_mpi)
  set(enabled OFF)
  if(NOT TENURE_MPI STREQUAL "OFF")
    find_package(MPI QUIET COMPONENTS C)
    if(MPI_C_FOUND)
      set(enabled ON)
    elseif(TENURE_MPI STREQUAL "ON")
      message(FATAL_ERROR "TENURE_MPI=ON needs an MPI library and mpicc: install libopenmpi-dev "
        "and openmpi-bin, or use TENURE_MPI=OFF")
    endif()
  endif()
  message(STATUS "MPI engine: ${enabled}")
  set(TENURE_MPI_ENABLED ${enabled} PARENT_SCOPE)
  set(MPIEXEC_EXECUTABLE ${MPIEXEC_EXECUTABLE} PARENT_SCOPE)
  set(MPIEXEC_NUMPROC_FLAG ${MPIEXEC_NUMPROC_FLAG} PARENT_SCOPE)
endfunction()

# Sets TENURE_NCCL_ENABLED in the caller.
function(tenure_find_nccl)
  set(enabled ON)
  if(TENURE_NCCL STREQUAL "OFF")
    set(enabled OFF)
  elseif(TENURE_NCCL STREQUAL "ON")
    find_library(TENURE_NCCL_LIBRARY NAMES libnccl.so.2 nccl
      PATHS /usr/local/cuda/lib /usr/local/cuda/lib64)
    if(NOT TENURE_NCCL_LIBRARY)
      message(FATAL_ERROR "TENURE_NCCL=ON needs libnccl.so.2: install libnccl2, or use "
        "TENURE_NCCL=AUTO, which loads it at run time where there is one")
    endif()
  endif()
  message(STATUS "NCCL engine: ${enabled}")
  set(TENURE_NCCL_ENABLED ${enabled} PARENT_SCOPE)
endfunction()

function(tenure_add_mpi_plugin)
  file(GLOB sources CONFIGURE_DEPENDS dist/mpi/*.c)
  set(map ${CMAKE_SOURCE_DIR}/dist/mpi/tenure_mpi.map)
  add_library(tenure-mpi MODULE ${sources})
  target_include_directories(tenure-mpi PRIVATE dist/mpi)
  target_link_libraries(tenure-mpi PRIVATE tenure-dist tenure MPI::MPI_C Threads::Threads)
  target_link_options(tenure-mpi PRIVATE -Wl,--version-script=${map})
  if(NOT TENURE_SANITIZE)
    target_link_options(tenure-mpi PRIVATE -Wl,-z,defs)
  endif()
  set_target_properties(tenure-mpi PROPERTIES LINK_DEPENDS ${map} INSTALL_RPATH "$ORIGIN")
  install(TARGETS tenure-mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

tenure_find_mpi()
tenure_find_nccl()
file(GLOB dist_headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} dist/tenure_*.h)
tenure_add_library(tenure-dist SOURCES dist/*.c MAP dist/tenure_dist.map
  HEADERS ${dist_headers} LINK tenure-ops tenure Threads::Threads ZLIB::ZLIB ${CMAKE_DL_LIBS} m)
target_compile_definitions(tenure-dist-objects PRIVATE
  TENURE_WITH_MPI=$<BOOL:${TENURE_MPI_ENABLED}> TENURE_WITH_NCCL=$<BOOL:${TENURE_NCCL_ENABLED}>)
if(TENURE_MPI_ENABLED)
  tenure_add_mpi_plugin()
endif()

# ---- tests ---------------------------------------------------------------------------------------

# Runs the program of a test under mpirun, once for each count of ranks, as
# dist/<name>_[<kind>_]<ranks>, with more in its environment.
function(tenure_run_ranks name kind environment)
  foreach(ranks ${ARGN})
    set(test dist/${name}${kind}_${ranks})
    add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
      $<TARGET_FILE:dist_test_${name}>)
    set_tests_properties(${test} PROPERTIES TIMEOUT ${TENURE_TEST_TIMEOUT_S}
      PROCESSORS 2 LABELS dist
      ENVIRONMENT "${TENURE_RANK_TEST_ENVIRONMENT};${environment}")
  endforeach()
endfunction()

# tests/dist/*_support.c is compiled once; a test has of it what it uses.
function(tenure_add_rank_support)
  file(GLOB support CONFIGURE_DEPENDS tests/dist/*_support.c)
  add_library(tenure_rank_support STATIC ${support})
  target_include_directories(tenure_rank_support PUBLIC tests/dist)
  target_link_libraries(tenure_rank_support PUBLIC tenure_test_support tenure-dist tenure-ops tenure
    ${TENURE_CMOCKA} ${CMAKE_DL_LIBS} m)
endfunction()

# A test of tests/dist over MPI, as dist/<name>_<ranks>.
function(tenure_add_rank_test name)
  set(target dist_test_${name})
  add_executable(${target} tests/dist/test_${name}.c)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_link_libraries(${target} PRIVATE tenure_rank_support)
  add_dependencies(${target} tenure-mpi)
  tenure_run_ranks(${name} "" "" ${ARGN})
endfunction()

# A test that forks its ranks itself, as dist/<name>; over the stand-in for NCCL, as
# dist/<name>_nccl or, with the name alone, if the test is of NCCL.
function(tenure_add_forked_test test name)
  add_test(NAME dist/${test} COMMAND dist_test_${name})
  set_tests_properties(dist/${test} PROPERTIES TIMEOUT ${TENURE_TEST_TIMEOUT_S}
    PROCESSORS 2 LABELS dist
    ENVIRONMENT "${TENURE_SANITIZER_ENVIRONMENT};${ARGN}")
endfunction()

# The same program over sockets, as dist/<name>_tcp_<ranks>.
function(tenure_add_tcp_test name)
  tenure_run_ranks(${name} _tcp TENURE_TEST_ENGINE=TCP ${ARGN})
endfunction()

# The same program over the stand-in for NCCL, as dist/<name>_nccl_<ranks>.
function(tenure_add_nccl_test name)
  if(NOT TARGET tenure_stand_in_nccl)
    return()
  endif()
  add_dependencies(dist_test_${name} tenure_stand_in_nccl)
  tenure_run_ranks(${name} _nccl "TENURE_TEST_ENGINE=NCCL;\
TENURE_NCCL_LIBRARY=$<TARGET_FILE:tenure_stand_in_nccl>" ${ARGN})
endfunction()

# The same program on the simulated CUDA driver, as dist/<name>_sim_<ranks>.
function(tenure_add_sim_rank_test name)
  tenure_run_ranks(${name} _sim "TENURE_RANKS_ON=sim;TENURE_SIM_STRICT_UNLOAD=1" ${ARGN})
endfunction()

# A rank is killed where the argument says, and Open MPI leaves the others alone: both, of three
# ranks, say that they are clean before the end; of four, three.
function(tenure_add_killed_rank_test engine ranks)
  math(EXPR survivors "${ranks} - 1")
  string(REPEAT "clean after a killed rank.*" ${survivors} words)
  string(TOLOWER ${engine} suffix)
  foreach(phase ${ARGN})
    set(test dist/killed_rank_${phase}_${suffix}_${ranks})
    add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} --enable-recovery ${MPIEXEC_NUMPROC_FLAG}
      ${ranks} $<TARGET_FILE:dist_test_killed_rank> ${phase})
    set_tests_properties(${test} PROPERTIES TIMEOUT ${TENURE_TEST_TIMEOUT_S}
      PROCESSORS 2 LABELS dist
      PASS_REGULAR_EXPRESSION "${words}" FAIL_REGULAR_EXPRESSION "  FAILED  "
      ENVIRONMENT "${TENURE_RANK_TEST_ENVIRONMENT};TENURE_TEST_ENGINE=${engine}")
  endforeach()
endfunction()

# Open MPI as root, with more ranks than cores, on one machine without a network; none of this
# means anything to another MPI. MPI's libraries leak, and are gone when leaks are listed, so that
# those can not be told from ours: the tests count our own host memory instead.
set(TENURE_RANK_TEST_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
  OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=self,vader
  OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_plm_rsh_agent=sh
  UBSAN_OPTIONS=print_stacktrace=1
  ASAN_OPTIONS=detect_leaks=0)

# Called at the end of the configuration, when what tests stand on is known.
function(tenure_add_rank_tests)
  tenure_add_rank_support()
  tenure_add_rank_test(collectives 1 2 3 4)
  tenure_add_rank_test(collectives_uneven 1 2 3 4)
  tenure_add_rank_test(all_to_all 1 2 3 4)
  tenure_add_rank_test(comm_groups 1 2 3)
  tenure_add_rank_test(comm_split 1 2 3 4)
  tenure_add_rank_test(collective_order 1 2 3)
  tenure_add_rank_test(collective_arguments 1 2 3)
  tenure_add_rank_test(sequence_gather 1 2 3 4 8)
  tenure_add_rank_test(parallel_linear 1 2 3 4)
  tenure_add_rank_test(parallel_norm 1 2 3 4)
  tenure_add_tcp_test(collectives 1 2 3 4)
  tenure_add_tcp_test(collectives_uneven 2 3 4)
  tenure_add_tcp_test(all_to_all 2 3 4)
  tenure_add_tcp_test(comm_groups 2 3)
  tenure_add_tcp_test(comm_split 2 4)
  tenure_add_tcp_test(collective_order 2 3)
  tenure_add_tcp_test(collective_arguments 2)
  tenure_add_rank_test(parallel_bytes 1 2 3 4)
  tenure_add_rank_test(parallel_training 1 2 3 4)
  tenure_add_rank_test(expert_training 1 2 3 4)
  tenure_add_rank_test(parallel_faults 1 2)
  tenure_add_tcp_test(parallel_faults 2)
  tenure_add_rank_test(sharded_lifetimes 1 2 3 4 8)
  tenure_add_rank_test(sharded_training 1 2 3 4 8)
  tenure_add_rank_test(sharded_arguments 1 2 3)
  tenure_add_rank_test(sharded_experts 1 2 3)
  tenure_add_rank_test(expert_exchange 1 2 3 4)
  tenure_add_rank_test(sharded_faults 1)
  tenure_add_rank_test(sharded_uneven 1 2 3)
  tenure_add_rank_test(sharded_alone 2)
  tenure_add_tcp_test(sharded_alone 2)
  tenure_add_sim_rank_test(sharded_alone 2)
  tenure_add_rank_test(comm_faults 1 2)
  tenure_add_tcp_test(comm_faults 1)
  tenure_add_rank_test(shard_ranks 1 2 3 4 8)
  tenure_add_rank_test(shard_reshard 1 2 3 4)
  tenure_add_rank_test(missing_rank 2 3 4)
  tenure_add_rank_test(comm_abort 2 4)
  tenure_add_tcp_test(comm_abort 2 3)
  tenure_add_sim_rank_test(comm_abort 2)
  tenure_add_rank_test(hung_rank 2 3)
  tenure_add_rank_test(killed_rank)
  # By hand: create, forward, update.
  tenure_add_killed_rank_test(MPI 3 collective backward anywhere)
  tenure_add_killed_rank_test(TCP 3 anywhere)
  tenure_add_killed_rank_test(MPI 4 write rename)
  tenure_add_rank_test(ring_ranks 1 2 3 4)
  tenure_add_sim_rank_test(collectives 1 2 4)
  tenure_add_sim_rank_test(collectives_uneven 1 3)
  tenure_add_sim_rank_test(comm_groups 1 3)
  tenure_add_sim_rank_test(comm_split 2 4)
  tenure_add_sim_rank_test(collective_order 1 2 3)
  tenure_add_rank_test(graph_ranks)
  tenure_add_sim_rank_test(graph_ranks 2)
  tenure_add_sim_rank_test(missing_rank 2 3)
  tenure_add_rank_test(staging 1 2 4)
  tenure_add_rank_test(checkpoints 1 2 3 4)
  tenure_add_sim_rank_test(checkpoints 2)
  tenure_add_rank_test(nccl_faults)
  tenure_add_rank_test(comm_shrink)
  tenure_add_forked_test(comm_shrink comm_shrink TENURE_TEST_ENGINE=TCP)
  tenure_add_sim_rank_test(sharded_lifetimes 2)
  if(TARGET tenure_stand_in_nccl)
    set(stand_in TENURE_TEST_ENGINE=NCCL
      TENURE_NCCL_LIBRARY=$<TARGET_FILE:tenure_stand_in_nccl>)
    add_dependencies(dist_test_nccl_faults tenure_stand_in_nccl)
    tenure_add_forked_test(nccl_faults nccl_faults ${stand_in})
    tenure_add_forked_test(comm_shrink_nccl comm_shrink ${stand_in} TENURE_TEST_RANKS=2)
    tenure_add_forked_test(comm_shrink_nccl_3 comm_shrink ${stand_in} TENURE_TEST_RANKS=3
      TENURE_TEST_FILTER=ranks_go_on_*)
  endif()
  tenure_add_nccl_test(collectives 3)
  tenure_add_nccl_test(collectives_uneven 3)
  tenure_add_nccl_test(all_to_all 2)
  tenure_add_nccl_test(comm_groups 2)
  tenure_add_nccl_test(comm_split 3)
  tenure_add_nccl_test(collective_order 2)
  tenure_add_nccl_test(parallel_training 2)
  tenure_add_nccl_test(sequence_gather 2)
  tenure_add_nccl_test(sharded_experts 2)
  tenure_add_nccl_test(shard_ranks 3)
  tenure_add_nccl_test(ring_ranks 2)
  tenure_add_nccl_test(checkpoints 2)
  set_tests_properties(gpu/dist PROPERTIES LABELS "gpu;gpu-dist" TIMEOUT 3600)
  # Exits by MPI_Abort, which the others do not survive: what was said before is what counts.
  set_tests_properties(dist/hung_rank_2 dist/hung_rank_3 PROPERTIES
    PASS_REGULAR_EXPRESSION # the two come by two pipes
      "clean after a hung rank.*aborting the job;aborting the job.*clean after a hung rank"
    FAIL_REGULAR_EXPRESSION "  FAILED  ")
endfunction()

# A library with NCCL's names that does as the test of the NCCL engine says.
if(TENURE_NCCL_ENABLED AND BUILD_TESTING)
  add_library(tenure_scripted_nccl MODULE tests/dist/scripted_nccl.c)
  target_include_directories(tenure_scripted_nccl PRIVATE tests/dist)
  set_target_properties(tenure_scripted_nccl PROPERTIES C_VISIBILITY_PRESET default
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  cmake_language(DEFER CALL add_dependencies unit_test_nccl_engine tenure_scripted_nccl)
  cmake_language(DEFER CALL add_dependencies unit_test_nccl_captures tenure_scripted_nccl)

  add_library(tenure_stand_in_nccl MODULE tests/dist/stand_in_nccl.c)
  target_link_libraries(tenure_stand_in_nccl PRIVATE m)
  set_target_properties(tenure_stand_in_nccl PROPERTIES C_VISIBILITY_PRESET default
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endif()
if(TENURE_MPI_ENABLED AND MPIEXEC_EXECUTABLE AND BUILD_TESTING)
  cmake_language(DEFER CALL tenure_add_rank_tests)
endif()
