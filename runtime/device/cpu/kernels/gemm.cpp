#include "runtime/device/cpu/kernels/gemm.h"

#include <Eigen/Core>

#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

using Index = std::int64_t;

// Eigen packs panels of both factors. Its own blocking allocates them on the heap or the stack;
// this one points into the workspace that the plan has counted.
class WorkspaceBlocking : public Eigen::internal::level3_blocking<float, float> {
 public:
  WorkspaceBlocking(float* a, float* b, Index mc, Index nc, Index kc) {
    m_blockA = a;
    m_blockB = b;
    m_mc = mc;
    m_nc = nc;
    m_kc = kc;
  }
};

struct Panels {
  float* a = nullptr;       // w: mc x kc
  float* b = nullptr;       // x: kc x nc
  float* rest_x = nullptr;  // 4 x kc
  float* rest_y = nullptr;  // 4 x mc
};

Panels panels_of(const Gemm& g) {
  const GemmBlocking b = clipped(g.blocking, g.m, g.n, g.k);
  Panels p;
  p.a = g.workspace;
  p.b = p.a + align_elements(b.m * b.k);
  p.rest_x = p.b + align_elements(b.n * b.k);
  p.rest_y = p.rest_x + align_elements(4 * b.k);
  return p;
}

// In Eigen's column-major terms the result is w (m x k) times x (k x n): a column is a token.
template <int WOrder, int XOrder>
void product(const Gemm& g) {
  if (g.m == 0 || g.n == 0 || g.k == 0) return;
  const GemmBlocking b = clipped(g.blocking, g.m, g.n, g.k);
  const Panels panels = panels_of(g);
  WorkspaceBlocking blocking(panels.a, panels.b, b.m, b.n, b.k);
  Eigen::internal::general_matrix_matrix_product<Index, float, WOrder, false, float, XOrder, false, Eigen::ColMajor,
                                                 1>::run(g.m, g.n, g.k, g.w, g.w_stride, g.x, g.x_stride, g.y, 1,
                                                         g.y_stride, g.scale, blocking, nullptr);
}

// Eigen sums columns that remain after groups of four in another order than those in a group. The
// last n % 4 tokens are therefore computed as a group padded with zeros, block by block in the same
// order.
template <int WOrder>
void product_by_rows(const Gemm& g) {
  const Index whole = g.n / 4 * 4;
  const Index rest = g.n - whole;
  Gemm head = g;
  head.n = whole;
  product<WOrder, Eigen::ColMajor>(head);
  if (rest == 0 || g.m == 0) return;
  const GemmBlocking b = clipped(g.blocking, g.m, g.n, g.k);
  const Panels panels = panels_of(g);
  for (Index m = 0; m < g.m; m += b.m) {
    const Index block_m = g.m - m < b.m ? g.m - m : b.m;
    for (Index k = 0; k < g.k; k += b.k) {
      const Index block_k = g.k - k < b.k ? g.k - k : b.k;
      for (Index i = 0; i < 4 * block_k; ++i) panels.rest_x[i] = 0.0f;
      for (Index i = 0; i < 4 * block_m; ++i) panels.rest_y[i] = 0.0f;
      for (Index t = 0; t < rest; ++t) {
        __builtin_memcpy(panels.rest_x + t * block_k, g.x + (whole + t) * g.x_stride + k, block_k * sizeof(float));
        __builtin_memcpy(panels.rest_y + t * block_m, g.y + (whole + t) * g.y_stride + m, block_m * sizeof(float));
      }
      WorkspaceBlocking blocking(panels.a, panels.b, block_m, 4, block_k);
      const float* w = WOrder == Eigen::RowMajor ? g.w + m * g.w_stride + k : g.w + k * g.w_stride + m;
      Eigen::internal::general_matrix_matrix_product<Index, float, WOrder, false, float, Eigen::ColMajor, false,
                                                     Eigen::ColMajor, 1>::run(block_m, 4, block_k, w, g.w_stride,
                                                                              panels.rest_x, block_k, panels.rest_y, 1,
                                                                              block_m, g.scale, blocking, nullptr);
      for (Index t = 0; t < rest; ++t)
        __builtin_memcpy(g.y + (whole + t) * g.y_stride + m, panels.rest_y + t * block_m, block_m * sizeof(float));
    }
  }
}

}  // namespace

void gemm_rows(const Gemm& gemm) { product_by_rows<Eigen::RowMajor>(gemm); }
void gemm_rows_transposed(const Gemm& gemm) { product_by_rows<Eigen::ColMajor>(gemm); }
void gemm_outer(const Gemm& gemm) { product<Eigen::ColMajor, Eigen::RowMajor>(gemm); }

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
