#include "planner/report/parts.h"

#include <array>

namespace parplan {
namespace {

constexpr std::array time_rows = {
    TimePart{"compute", &StepTime::compute},
    TimePart{"recompute", &StepTime::recompute},
    TimePart{"tensor-parallel communication", &StepTime::tensor_exposed},
    TimePart{"data-parallel communication", &StepTime::data_exposed},
    TimePart{"transfers between stages", &StepTime::pipeline_exposed},
    TimePart{"bubble", &StepTime::bubble},
    TimePart{"optimizer", &StepTime::optimizer},
};

constexpr std::array memory_rows = {
    MemoryPart{"parameters", &MemoryUse::parameters},
    MemoryPart{"gradients", &MemoryUse::gradients},
    MemoryPart{"optimizer state", &MemoryUse::optimizer},
    MemoryPart{"activations", &MemoryUse::activations},
    MemoryPart{"buffers", &MemoryUse::buffers},
    MemoryPart{"libraries (outside the arena)", &MemoryUse::overhead},
};

constexpr std::array communication_rows = {
    CommunicationPart{"tensor parallelism", &CommunicationVolume::tensor},
    CommunicationPart{"data parallelism", &CommunicationVolume::data},
    CommunicationPart{"between stages", &CommunicationVolume::pipeline},
};

}  // namespace

std::span<const TimePart> time_parts() { return time_rows; }
std::span<const MemoryPart> memory_parts() { return memory_rows; }
std::span<const CommunicationPart> communication_parts() { return communication_rows; }

}  // namespace parplan
