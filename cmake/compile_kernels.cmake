# Compiles SOURCE with NVCC and FLAGS into the fat binary IMAGE, or copies the one in CACHE that was
# made of the same text, headers, flags and compiler.
#
# usage: cmake -DNVCC= -DFLAGS= -DSOURCE= -DHEADERS= -DIMAGE= -DCACHE= -P compile_kernels.cmake

execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE made_of COMMAND_ERROR_IS_FATAL ANY)
string(APPEND made_of "${FLAGS}")
foreach(file ${SOURCE} ${HEADERS})
  file(SHA256 ${file} hash)
  string(APPEND made_of "\n${hash} ${file}")
endforeach()
string(SHA256 key "${made_of}")
get_filename_component(name ${SOURCE} NAME_WE)
set(kept ${CACHE}/${name}_${key}.fatbin)

if(NOT EXISTS ${kept})
  execute_process(COMMAND ${NVCC} ${FLAGS} -o ${IMAGE} ${SOURCE} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "nvcc failed on ${SOURCE}")
  endif()
  # Only the latest of a source is kept. The last rename shows whole files alone.
  file(GLOB older ${CACHE}/${name}_*.fatbin)
  file(MAKE_DIRECTORY ${CACHE})
  file(COPY_FILE ${IMAGE} ${kept}.${key})
  file(RENAME ${kept}.${key} ${kept})
  if(older)
    file(REMOVE ${older})
  endif()
else()
  file(COPY_FILE ${kept} ${IMAGE})
  file(TOUCH ${IMAGE})
endif()
