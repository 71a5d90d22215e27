#pragma once

#include <cstdint>

// Eigen alone: the same products, written as its users write them, compiled for x86-64-v4 in a
// separate file.
namespace parplan::bench {

// y[rows, columns] = x[rows, inner] w[columns, inner]
void eigen_forward(const float* x, const float* w, float* y, std::int64_t rows, std::int64_t columns,
                   std::int64_t inner);
// dx[rows, inner] = dy[rows, columns] w
void eigen_input_gradient(const float* dy, const float* w, float* dx, std::int64_t rows, std::int64_t columns,
                          std::int64_t inner);
// dw[columns, inner] += dy^T x
void eigen_weight_gradient(const float* dy, const float* x, float* dw, std::int64_t rows, std::int64_t columns,
                           std::int64_t inner);

}  // namespace parplan::bench
