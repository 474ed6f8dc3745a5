# pool_simulation and plane_simulation: random programs against oracles, and builds of them in which
# a fault is planted.

file(GLOB pool_simulation_sources CONFIGURE_DEPENDS tests/simulation/*.c)
file(GLOB plane_simulation_sources CONFIGURE_DEPENDS tests/plane_simulation/*.c)

# The simulation `kind`, pool or plane. Sources of the library named after the target are compiled
# once more, with the planted fault; the linker then has no need of the archive's.
function(tenure_add_simulation kind target)
  add_executable(${target} ${${kind}_simulation_sources} ${ARGN})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${target} PRIVATE alloc/simcuda)
  target_compile_definitions(${target} PRIVATE
    TENURE_SIM_LIBRARY="${CMAKE_BINARY_DIR}/libtenure-simcuda.so")
  target_link_libraries(${target} PRIVATE tenure-internal)
  add_dependencies(${target} tenure-simcuda)
endfunction()

function(tenure_add_simulation_test name)
  add_test(NAME simulation/${name} COMMAND ${ARGN})
  tenure_set_test_properties(simulation/${name})
endfunction()

# A fault of alloc/canary.h: its number, and the source that it is planted in; how it is looked for.
function(tenure_add_canary kind test number source)
  set(target ${kind}_simulation_canary_${number})
  tenure_add_simulation(${kind} ${target} ${source})
  target_compile_definitions(${target} PRIVATE TENURE_CANARY=${number})
  tenure_add_simulation_test(${test}_${number} ${target} ${ARGN} --expect-failure)
endfunction()

# ---- pools ---------------------------------------------------------------------------------------

tenure_add_simulation(pool pool_simulation)
# A sanitizer makes it thirty times slower, and sees more in each step.
if(TENURE_SANITIZE)
  tenure_add_simulation_test(short pool_simulation --operations 60000 --steps 8000)
else()
  tenure_add_simulation_test(short
    pool_simulation --operations 400000 --steps 8000 --all-counts)
endif()
tenure_add_simulation_test(sequences pool_simulation --sequences 4)

# Random programs do not repeat themselves: in this build they are placed by history all the same.
tenure_add_simulation(pool pool_simulation_history alloc/heap_history.c)
target_compile_definitions(pool_simulation_history PRIVATE TENURE_HISTORY_EAGER)
tenure_add_simulation_test(history pool_simulation_history --operations 60000 --steps 8000)

set(pool_search --operations 1000000 --steps 8000)
tenure_add_canary(pool canary 1 alloc/pool_order.c ${pool_search})
tenure_add_canary(pool canary 2 alloc/pool_idle.c ${pool_search})
tenure_add_canary(pool canary 3 alloc/pool_alloc.c ${pool_search})
tenure_add_canary(pool canary 4 alloc/thread_cache.c ${pool_search})
tenure_add_canary(pool canary 5 alloc/pool_order.c ${pool_search})

# ---- planes --------------------------------------------------------------------------------------

tenure_add_simulation(plane plane_simulation)
tenure_add_simulation_test(planes plane_simulation --steps 200000)
tenure_add_simulation_test(plane_sequences plane_simulation --sequences 3)
tenure_add_simulation_test(plane_faults plane_simulation --faults 2)

set(plane_search --steps 100000)
tenure_add_canary(plane plane_canary 11 tensor/plane_order.c ${plane_search})
tenure_add_canary(plane plane_canary 12 tensor/plane_order.c ${plane_search})
tenure_add_canary(plane plane_canary 13 tensor/plane_transition.c ${plane_search})
tenure_add_canary(plane plane_canary 14 tensor/plane_transition.c ${plane_search})
tenure_add_canary(plane plane_canary 15 tensor/scratch_slot.c ${plane_search})
tenure_add_canary(plane plane_canary 16 tensor/plane_relocate.c ${plane_search})
tenure_add_canary(plane plane_canary 17 tensor/plane_transition.c ${plane_search})

# ---- rings ---------------------------------------------------------------------------------------

# The random programs of tests/sim/test_ring_random.c, with a fault planted in the ring.
function(tenure_add_ring_canary number)
  set(target ring_canary_${number})
  add_executable(${target} tests/sim/test_ring_random.c dist/ring_state.c)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_compile_definitions(${target} PRIVATE TENURE_CANARY=${number})
  target_link_libraries(${target} PRIVATE tenure_test_support tenure-dist-internal
    tenure-ops-internal tenure-internal ${TENURE_CMOCKA})
  add_dependencies(${target} tenure-simcuda)
  tenure_add_simulation_test(${target} ${target} --expect-failure)
endfunction()

tenure_add_ring_canary(21)
tenure_add_ring_canary(22)
tenure_add_ring_canary(23)
