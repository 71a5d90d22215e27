#pragma once
#include "tests/cuda_emulator/cuda_runtime.h"
