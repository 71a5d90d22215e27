# A plan run as threads of one process and as processes of MPI gives the same losses, to the last
# digit printed. cmake -DPARPLAN=program -DMPIEXEC=program -DSOURCE=top -DFOLDER=of the outputs -P
# run_plans.cmake
file(MAKE_DIRECTORY ${FOLDER})
file(READ ${SOURCE}/tests/data/models/tiny-gpt2.yaml model)
string(REGEX REPLACE "vocabulary: [0-9]+" "vocabulary: 256" model "${model}")  # that of the bytes of a text
file(WRITE ${FOLDER}/model.yaml "${model}")

function(losses_of variable)
  execute_process(COMMAND ${ARGN} run ${FOLDER}/plan.yaml --steps 3
    OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE code)
  string(REGEX MATCHALL "step +[0-9]+ +loss [0-9.]+" losses "${output}")
  list(LENGTH losses count)
  if(NOT code EQUAL 0 OR NOT count EQUAL 3)
    message(FATAL_ERROR "${ARGN}: exit code ${code}\n${output}\n${errors}")
  endif()
  set(${variable} "${losses}" PARENT_SCOPE)
endfunction()

foreach(layout "--pp;2;--dp;2" "--pp;2;--dp;2;--schedule;zero_bubble_v" "--tp;2;--dp;2" "--dp;4;--zero;3"
               "--dp;4;--dp-method;master")
  execute_process(COMMAND ${PARPLAN} suggest ${FOLDER}/model.yaml
    --cluster ${SOURCE}/tests/data/clusters/cpu-8.yaml --devices 4 ${layout}
    -o ${FOLDER}/plan.yaml OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  losses_of(threads ${PARPLAN})
  losses_of(processes ${MPIEXEC} -n 4 --oversubscribe ${PARPLAN})
  message("${layout}\nthreads    ${threads}\nprocesses  ${processes}")
  if(NOT threads STREQUAL processes)
    message(FATAL_ERROR "they differ")
  endif()
endforeach()
