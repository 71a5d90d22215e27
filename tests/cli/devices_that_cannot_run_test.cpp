// What the kind of device decides before any search: the default precision, and whether a plan can
// be run.
#include <doctest/doctest.h>

#include <string>

#include "tests/cli/call.h"

using namespace parplan;
using namespace parplan::testing;

TEST_CASE("the default precision is one that the device has units for, and is marked as a default") {
  struct Row {
    const char* cluster;
    const char* precision;
  };
  for (const Row& row :
       {Row{"titan-rtx-2", "fp16"}, Row{"dgx-1-v100", "fp16"}, Row{"dgx-a100", "bf16"}, Row{"gaudi2-8", "bf16"}}) {
    INFO(row.cluster);
    const Called called = call({"suggest", "gpt2", "--cluster", row.cluster, "--max-candidates", "1"});
    CHECK(called.code == 0);
    CHECK(called.out.find(std::string("precision ") + row.precision + " (default)") != std::string::npos);
  }
  const Called asked =
      call({"suggest", "gpt2", "--cluster", "titan-rtx-2", "--precision", "bf16", "--max-candidates", "1"});
  CHECK(asked.code == 0);
  CHECK(asked.out.find("precision bf16, ") != std::string::npos);
}

TEST_CASE("a plan for devices that parplan runs nothing on says so, and is refused by run") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const Called suggested =
      call({"suggest", "gpt2", "--cluster", "mi300x-8", "--max-candidates", "1", "--output", plan});
  CHECK(suggested.code == 0);
  CHECK(suggested.err.find("note: mi300x-8: planned only, for parplan runs nothing on ROCm; RCCL is taken to "
                           "communicate as NCCL does\n") != std::string::npos);
  const std::string loops =
      " are timed as in benchmark loops, since no training rate is known: predicted steps are too short\n";
  CHECK(suggested.err.find(loops) == std::string::npos);
  CHECK(call({"suggest", "gpt2", "--cluster", "gaudi2-8", "--max-candidates", "1"})
            .err.find("note: gaudi2-8: products in bf16 on gaudi2-96gb" + loops) !=
        std::string::npos);
  const Called refused = call({"run", plan});
  CHECK(refused.code == 2);
  CHECK(refused.err ==
        "error: the plan is for AMD Instinct MI300X 192 GB, and parplan runs nothing on ROCm: carry it out with "
        "another framework, or make a plan for this "
        "machine with `parplan suggest MODEL`\n");
  const Called other = call({"run", plan, "--backend", "cuda"});
  CHECK(other.code == 2);
  CHECK(other.err ==
        "error: --backend cuda: the plan is for AMD Instinct MI300X 192 GB (rocm); its memory and its kernels are that "
        "backend's: plan again with a cluster of "
        "CUDA devices\n");
}
