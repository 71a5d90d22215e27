#pragma once

// The files of this folder are compiled once per instruction set, each time into another namespace,
// with Eigen renamed (see CMakeLists.txt). Templates and inline functions of the standard library
// would keep their name, and the linker might then keep the AVX-512 copy for every machine; so
// these files use none.
#ifndef PARPLAN_CPU_NAMESPACE
#define PARPLAN_CPU_NAMESPACE cpu_baseline
#endif
