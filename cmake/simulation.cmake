# pool_simulation, random programs against an oracle, and builds of it in which a fault is planted.

file(GLOB simulation_sources CONFIGURE_DEPENDS tests/simulation/*.c)

# Sources of the library named after the target are compiled once more, with the planted fault;
# the linker then has no need of the archive's.
function(tenure_add_simulation target)
  add_executable(${target} ${simulation_sources} ${ARGN})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE tests/simulation alloc/simcuda)
  target_compile_definitions(${target} PRIVATE
    TENURE_SIM_LIBRARY="${CMAKE_BINARY_DIR}/libtenure-simcuda.so")
  target_link_libraries(${target} PRIVATE tenure-internal)
  add_dependencies(${target} tenure-simcuda)
endfunction()

tenure_add_simulation(pool_simulation)
# A sanitizer makes it thirty times slower, and sees more in each step.
if(TENURE_SANITIZE)
  add_test(NAME simulation/short COMMAND pool_simulation --operations 60000 --steps 8000)
else()
  add_test(NAME simulation/short
    COMMAND pool_simulation --operations 400000 --steps 8000 --all-counts)
endif()
tenure_set_test_properties(simulation/short)

# Random programs do not repeat themselves: in this build they are placed by history all the same.
tenure_add_simulation(pool_simulation_history alloc/heap_history.c)
target_compile_definitions(pool_simulation_history PRIVATE TENURE_HISTORY_EAGER)
add_test(NAME simulation/history
  COMMAND pool_simulation_history --operations 60000 --steps 8000)
tenure_set_test_properties(simulation/history)

# A fault of alloc/canary.h: its number, and the source that it is planted in.
function(tenure_add_canary number source)
  set(target pool_simulation_canary_${number})
  tenure_add_simulation(${target} ${source})
  target_compile_definitions(${target} PRIVATE TENURE_CANARY=${number})
  add_test(NAME simulation/canary_${number}
    COMMAND ${target} --operations 1000000 --steps 8000 --expect-failure)
  tenure_set_test_properties(simulation/canary_${number})
endfunction()

tenure_add_canary(1 alloc/pool_order.c)
tenure_add_canary(2 alloc/pool_idle.c)
tenure_add_canary(3 alloc/pool_alloc.c)
tenure_add_canary(4 alloc/thread_cache.c)
tenure_add_canary(5 alloc/pool_order.c)

add_test(NAME simulation/sequences COMMAND pool_simulation --sequences 4)
tenure_set_test_properties(simulation/sequences)

# ---- planes: plane_simulation --------------------------------------------------------------------

file(GLOB plane_simulation_sources CONFIGURE_DEPENDS tests/plane_simulation/*.c)

function(tenure_add_plane_simulation target)
  add_executable(${target} ${plane_simulation_sources} ${ARGN})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE tests/plane_simulation alloc/simcuda)
  target_compile_definitions(${target} PRIVATE
    TENURE_SIM_LIBRARY="${CMAKE_BINARY_DIR}/libtenure-simcuda.so")
  target_link_libraries(${target} PRIVATE tenure-internal)
  add_dependencies(${target} tenure-simcuda)
endfunction()

tenure_add_plane_simulation(plane_simulation)
add_test(NAME simulation/planes COMMAND plane_simulation --steps 200000)
tenure_set_test_properties(simulation/planes)
add_test(NAME simulation/plane_sequences COMMAND plane_simulation --sequences 3)
tenure_set_test_properties(simulation/plane_sequences)
add_test(NAME simulation/plane_faults COMMAND plane_simulation --faults 2)
tenure_set_test_properties(simulation/plane_faults)

function(tenure_add_plane_canary number source)
  set(target plane_simulation_canary_${number})
  tenure_add_plane_simulation(${target} ${source})
  target_compile_definitions(${target} PRIVATE TENURE_CANARY=${number})
  add_test(NAME simulation/plane_canary_${number}
    COMMAND ${target} --steps 100000 --expect-failure)
  tenure_set_test_properties(simulation/plane_canary_${number})
endfunction()

tenure_add_plane_canary(11 tensor/plane_order.c)
tenure_add_plane_canary(12 tensor/plane_order.c)
tenure_add_plane_canary(13 tensor/plane_transition.c)
tenure_add_plane_canary(14 tensor/plane_transition.c)
