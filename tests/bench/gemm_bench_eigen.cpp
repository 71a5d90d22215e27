#define EIGEN_DONT_PARALLELIZE
#define EIGEN_NO_DEBUG
#include "tests/bench/gemm_bench.h"

#include <Eigen/Core>

namespace parplan::bench {

namespace {
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Input = Eigen::Map<const Matrix>;
using Output = Eigen::Map<Matrix>;
}  // namespace

void eigen_forward(const float* x, const float* w, float* y, std::int64_t rows, std::int64_t columns,
                   std::int64_t inner) {
  Output(y, rows, columns).noalias() = Input(x, rows, inner) * Input(w, columns, inner).transpose();
}

void eigen_input_gradient(const float* dy, const float* w, float* dx, std::int64_t rows, std::int64_t columns,
                          std::int64_t inner) {
  Output(dx, rows, inner).noalias() = Input(dy, rows, columns) * Input(w, columns, inner);
}

void eigen_weight_gradient(const float* dy, const float* x, float* dw, std::int64_t rows, std::int64_t columns,
                           std::int64_t inner) {
  Output(dw, columns, inner).noalias() += Input(dy, rows, columns).transpose() * Input(x, rows, inner);
}

}  // namespace parplan::bench
