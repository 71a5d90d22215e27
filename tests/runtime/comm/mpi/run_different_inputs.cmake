# Processes of one job that were started with different plans, data or options all end with exit
# code 2 before the first step, and one of them says what differs. cmake -DPARPLAN=program
# -DMPIEXEC=program -DSOURCE=top -DFOLDER=of the outputs -P run_different_inputs.cmake
file(MAKE_DIRECTORY ${FOLDER})
file(READ ${SOURCE}/tests/data/models/tiny-gpt2.yaml model)
string(REGEX REPLACE "vocabulary: [0-9]+" "vocabulary: 256" model "${model}")  # that of the bytes of a text
file(WRITE ${FOLDER}/model.yaml "${model}")

function(make_plan name)
  execute_process(COMMAND ${PARPLAN} suggest ${FOLDER}/model.yaml
    --cluster ${SOURCE}/tests/data/clusters/cpu-8.yaml --devices 2 ${ARGN}
    -o ${FOLDER}/${name}.yaml OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# What both processes print, and their exit codes.
function(run_two output first second)
  set(says "\"$@\"; echo exit code $?")
  execute_process(COMMAND ${MPIEXEC} --oversubscribe
    -n 1 sh -c "${says}" sh ${PARPLAN} run --quiet ${first} :
    -n 1 sh -c "${says}" sh ${PARPLAN} run --quiet ${second}
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code TIMEOUT 100)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${second}: mpirun ends with ${code}\n${said}")
  endif()
  set(${output} "${said}" PARENT_SCOPE)
endfunction()

# The second process's arguments, and what the message says of them.
function(expect_refusal what)
  run_two(said "${FOLDER}/plan.yaml;--steps;3" "${ARGN}")
  string(REGEX MATCHALL "exit code 2" codes "${said}")
  string(REGEX MATCHALL "error: the processes of this job differ: " messages "${said}")
  list(LENGTH codes ended)
  list(LENGTH messages count)
  string(FIND "${said}" "${what}" found)
  string(REGEX MATCH "loss" loss "${said}")
  if(NOT ended EQUAL 2 OR NOT count EQUAL 1 OR found EQUAL -1 OR loss)
    message(FATAL_ERROR "${ARGN}: '${what}' is not what is said, once:\n${said}")
  endif()
endfunction()

make_plan(plan --dp 2)
foreach(fact "learning_rate|0.125|learning rate" "seed|99|seed" "beta2|0.5|beta2" "weight_decay|0.5|weight decay"
    "clip_norm|1|clip norm")
  string(REPLACE "|" ";" fact "${fact}")
  list(GET fact 0 key)
  list(GET fact 1 value)
  list(GET fact 2 name)
  file(READ ${FOLDER}/plan.yaml plan)
  string(REGEX MATCH "\n  ${key}: ([^\n]*)" line "${plan}")
  set(own "${CMAKE_MATCH_1}")
  string(REPLACE "${line}" "\n  ${key}: ${value}" plan "${plan}")
  file(WRITE ${FOLDER}/edited.yaml "${plan}")
  expect_refusal("rank 1 has ${name} ${value}, rank 0 has ${own}" ${FOLDER}/edited.yaml --steps 3)
endforeach()
make_plan(batch --dp 2 --global-batch 16)
expect_refusal("rank 1 has global batch 16, rank 0 has 8" ${FOLDER}/batch.yaml --steps 3)
make_plan(layout --pp 2)
expect_refusal("rank 1 has layout.dp 1, rank 0 has 2" ${FOLDER}/layout.yaml --steps 3)
expect_refusal("rank 1 has --steps 4, rank 0 has 3" ${FOLDER}/plan.yaml --steps 4)
string(REPEAT "parallel plans " 100 text)
file(WRITE ${FOLDER}/text "${text}")
expect_refusal("rank 1 has data of 1500 tokens (fingerprint " ${FOLDER}/plan.yaml --steps 3 --data ${FOLDER}/text)

# The same plan and data under other names is no difference.
file(COPY_FILE ${FOLDER}/plan.yaml ${FOLDER}/edited.yaml)
run_two(said "${FOLDER}/plan.yaml;--steps;2" "${FOLDER}/edited.yaml;--steps;2")
string(REGEX MATCHALL "exit code 0" codes "${said}")
list(LENGTH codes ended)
if(NOT ended EQUAL 2)
  message(FATAL_ERROR "equal plans:\n${said}")
endif()
