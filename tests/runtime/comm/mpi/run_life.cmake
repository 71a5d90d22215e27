# How a job of processes ends before its last step: all of them, alike, after the report is written.
# cmake -DPARPLAN=program -DMPIEXEC=program -DSOURCE=top -DFOLDER=of the outputs -P run_life.cmake
file(MAKE_DIRECTORY ${FOLDER})
file(READ ${SOURCE}/tests/data/models/tiny-gpt2.yaml model)
string(REGEX REPLACE "vocabulary: [0-9]+" "vocabulary: 256" model "${model}")  # that of the bytes of a text
file(WRITE ${FOLDER}/model.yaml "${model}")

# What a script of the shell says, and how it ends.
function(run_script output script)
  execute_process(COMMAND sh -c "${script}" WORKING_DIRECTORY ${FOLDER}
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code TIMEOUT 200)
  set(${output} "${said}\nended with ${code}" PARENT_SCOPE)
endfunction()

function(expect text count said)
  string(REGEX MATCHALL "${text}" found "${said}")
  list(LENGTH found times)
  if(NOT times EQUAL count)
    message(FATAL_ERROR "'${text}' is said ${times} times instead of ${count}:\n${said}")
  endif()
endfunction()

# The numbers of a log that do not depend on time.
function(log_of variable name)
  file(READ ${FOLDER}/${name} text)
  string(REGEX REPLACE "\"step_time_s\":[^,]*," "" text "${text}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# One process: it leaves its id, and says its exit code.
file(WRITE ${FOLDER}/one.sh "sh -c 'echo $$ > pid.$OMPI_COMM_WORLD_RANK; exec \"$0\" run \"$@\"' ${PARPLAN} \"$@\"
echo exit code $?
")
foreach(layout "--dp;2" "--pp;2;--dp;1" "--tp;2;--dp;1")
  execute_process(COMMAND ${PARPLAN} suggest ${FOLDER}/model.yaml
    --cluster ${SOURCE}/tests/data/clusters/cpu-8.yaml --devices 2 ${layout}
    -o ${FOLDER}/plan.yaml OUTPUT_QUIET ERROR_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${FOLDER}/plan.yaml plan)
  string(REGEX REPLACE "\n  learning_rate: [^\n]*" "\n  learning_rate: 1e36" plan "${plan}")
  file(WRITE ${FOLDER}/steep.yaml "${plan}")
  set(start "${MPIEXEC} --oversubscribe -n 2 sh one.sh")

  # A loss that is not a number.
  run_script(said "${start} steep.yaml --steps 9 --quiet --json run.json")
  expect("exit code 1\n" 2 "${said}")
  expect("error: the loss of step 1 is not a number: the run ended after 2 of 9 steps" 1 "${said}")
  file(READ ${FOLDER}/run.json report)
  expect("\"ended\": \"the loss of step 1 is not a number\"" 1 "${report}")

  # Skipped steps, as threads and as processes.
  run_script(said "${start} steep.yaml --steps 5 --quiet --on-nan skip --log processes.jsonl")
  expect("exit code 0\n" 2 "${said}")
  run_script(said "${PARPLAN} run steep.yaml --steps 5 --quiet --on-nan skip --log threads.jsonl")
  expect("ended with 0" 1 "${said}")
  log_of(processes processes.jsonl)
  log_of(threads threads.jsonl)
  expect("\"skipped\":true" 4 "${threads}")
  if(NOT processes STREQUAL threads)
    message(FATAL_ERROR "${layout}: as processes\n${processes}as threads\n${threads}")
  endif()

  # A signal that one process gets ends all after the same step.
  foreach(rank 0 1)
    run_script(said "rm -f log.jsonl run.json
${start} plan.yaml --steps 1000000000 --quiet --log log.jsonl --json run.json &
while kill -0 $! && [ ! -s log.jsonl ]; do sleep 0.01; done
kill -TERM $(cat pid.${rank}); wait $!")
    expect("exit code 143\n" 2 "${said}")
    expect("the run ended after [0-9]+ of 1000000000 steps, because of SIGTERM" 1 "${said}")
    file(READ ${FOLDER}/run.json report)
    expect("\"ended\": \"SIGTERM\"" 1 "${report}")
    string(REGEX MATCH "\"steps\": ([0-9]+)" steps "${report}")
    file(STRINGS ${FOLDER}/log.jsonl lines)
    list(LENGTH lines count)
    if(NOT count EQUAL CMAKE_MATCH_1)
      message(FATAL_ERROR "${count} lines of the log, and ${steps}")
    endif()
  endforeach()
endforeach()
