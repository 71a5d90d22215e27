#pragma once

// CUDA's built-in vector types, with its sizes and alignments (CUDA C++ Programming Guide,
// "Built-in Vector Types"). They are aggregates, as there.

#define CUDA_EMULATOR_VECTORS(element, name, align2, align4)                     \
  struct name##1 {                                                               \
    element x;                                                                   \
  };                                                                             \
  struct alignas(align2) name##2 {                                               \
    element x, y;                                                                \
  };                                                                             \
  struct name##3 {                                                               \
    element x, y, z;                                                             \
  };                                                                             \
  struct alignas(align4) name##4 {                                               \
    element x, y, z, w;                                                          \
  };                                                                             \
  constexpr name##1 make_##name##1(element x) {                                  \
    return {x};                                                                  \
  }                                                                              \
  constexpr name##2 make_##name##2(element x, element y) {                       \
    return {x, y};                                                               \
  }                                                                              \
  constexpr name##3 make_##name##3(element x, element y, element z) {            \
    return {x, y, z};                                                            \
  }                                                                              \
  constexpr name##4 make_##name##4(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                         \
  }

CUDA_EMULATOR_VECTORS(signed char, char, 2, 4)
CUDA_EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
CUDA_EMULATOR_VECTORS(short, short, 4, 8)
CUDA_EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
CUDA_EMULATOR_VECTORS(int, int, 8, 16)
CUDA_EMULATOR_VECTORS(unsigned int, uint, 8, 16)
CUDA_EMULATOR_VECTORS(long, long, 16, 16)
CUDA_EMULATOR_VECTORS(unsigned long, ulong, 16, 16)
CUDA_EMULATOR_VECTORS(long long, longlong, 16, 16)
CUDA_EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDA_EMULATOR_VECTORS(float, float, 8, 16)
CUDA_EMULATOR_VECTORS(double, double, 16, 16)

#undef CUDA_EMULATOR_VECTORS

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
  constexpr dim3(unsigned int vx = 1, unsigned int vy = 1, unsigned int vz = 1) : x(vx), y(vy), z(vz) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
