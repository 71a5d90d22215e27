#include <string>

#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/work_division.h"

extern __shared__ __align__(16) unsigned char dynamic_shared[];

namespace parplan {
namespace {

struct Heads {
  int heads = 0;      // of all kinds
  int per_group = 0;  // queries, the key, the value
  int head_dim = 0;
  int half = 0;  // half of the rotated elements of a head, which are its first
};

// Rotates one pair.
__device__ __forceinline__ void turn(float& low, float& high, float cosine, float sine) {
  const float turned = low * cosine - high * sine;
  high = high * cosine + low * sine;
  low = turned;
}

// blockIdx.x is the row of a position; its cosines and sines are computed once for all heads and
// samples (blockIdx.y divides those). Element i of a head is paired with i + half (the convention
// of GPT-NeoX and Hugging Face), or with `interleaved` 2i with 2i + 1 (GPT-J's); the angle position
// * theta^(-i / half) / factor is rounded to fp32 where Hugging Face rounds it. `direction` -1
// rotates back, which is the gradient. The rest of a head and the values are copied; `to` may be
// `from`.
template <class T, int width, bool interleaved>
__global__ void rotate(const T* from, T* to, Heads h, std::int64_t batch, std::int64_t begin, ContextChunks chunks,
                       double theta, float factor, float direction) {
  float* cosine = reinterpret_cast<float*>(dynamic_shared);
  float* sine = cosine + h.half;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const float position = static_cast<float>(begin + chunks.position(blockIdx.x));
  for (int i = thread; i < h.half; i += threads) {
    const float frequency =
        static_cast<float>(1.0 / pow(theta, static_cast<double>(i) / static_cast<double>(h.half))) / factor;
    const float angle = position * frequency;
    cosine[i] = cosf(angle);
    sine[i] = direction * sinf(angle);
  }
  __syncthreads();
  const int vectors_per_head = h.half / width;
  const int vectors = h.heads * vectors_per_head;
  const int copies_per_head = from == to ? 0 : (h.head_dim - 2 * h.half) / width;
  const std::int64_t columns = static_cast<std::int64_t>(h.heads) * h.head_dim;
  for (std::int64_t sample = blockIdx.y; sample < batch; sample += gridDim.y) {
    const std::int64_t row = (blockIdx.x * batch + sample) * columns;
    for (int v = thread; v < vectors; v += threads) {
      const int head = v / vectors_per_head;
      const int i = (v - head * vectors_per_head) * width;  // the first pair
      const std::int64_t at = row + static_cast<std::int64_t>(head) * h.head_dim + (interleaved ? 2 * i : i);
      const int apart = interleaved ? width : h.half;
      const bool is_value = head % h.per_group == h.per_group - 1;
      if (is_value && from == to) continue;
      float low[width], high[width];
      load(from + at, low);
      load(from + at + apart, high);
      if (!is_value) {
        if constexpr (interleaved && width > 1) {
#pragma unroll
          for (int k = 0; k < width / 2; ++k) {
            turn(low[2 * k], low[2 * k + 1], cosine[i + k], sine[i + k]);
            turn(high[2 * k], high[2 * k + 1], cosine[i + width / 2 + k], sine[i + width / 2 + k]);
          }
        } else {
#pragma unroll
          for (int k = 0; k < width; ++k) turn(low[k], high[k], cosine[i + k], sine[i + k]);
        }
      }
      store(to + at, low);
      store(to + at + apart, high);
    }
    for (int v = thread; v < h.heads * copies_per_head; v += threads) {
      const int head = v / copies_per_head;
      const std::int64_t at =
          row + static_cast<std::int64_t>(head) * h.head_dim + 2 * h.half + (v - head * copies_per_head) * width;
      float values[width];
      load(from + at, values);
      store(to + at, values);
    }
  }
}

void submit(const CudaKernelArguments& a, float direction) {
  const OpShape& s = a.shape;
  if (s.sequence <= 0 || s.batch <= 0) return;
  const Heads heads{.heads = static_cast<int>(s.heads + 2 * s.kv_heads),
                    .per_group = static_cast<int>(s.heads / s.kv_heads + 2),
                    .head_dim = static_cast<int>(s.head_dim),
                    .half = static_cast<int>((s.rotary_dim > 0 ? s.rotary_dim : s.head_dim) / 2)};
  const std::size_t shared = 2 * sizeof(float) * static_cast<std::size_t>(heads.half);
  PARPLAN_ASSERT(shared <= 48 << 10, "head_dim " + std::to_string(s.head_dim));
  // One sample per block where there are few positions; the angles are computed again in each.
  const std::int64_t samples = s.sequence >= 1024 ? divide_up(s.batch, 4) : s.batch;
  const Grid grid{.blocks = dim3(rows_of_grid(s.sequence), static_cast<unsigned>(samples < 65535 ? samples : 65535)),
                  .threads = dim3(256),
                  .shared = shared};
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* from = a.at<const T>(0);
    T* to = a.at<T>(1);
    const auto submit_width = [&](auto width) {
      constexpr int n = decltype(width)::width;
      launch("rotary", s.interleaved ? rotate<T, n, true> : rotate<T, n, false>, grid, a.stream, from, to, heads,
             s.batch, s.begin, s.chunks, s.theta, s.factor != 0.0 ? static_cast<float>(s.factor) : 1.0f, direction);
    };
    if (heads.half % vector_width<T> == 0 && rows_can_move(vector_width<T>, heads.head_dim, {from, to})) {
      submit_width(Count<vector_width<T>>{});
    } else {
      submit_width(Count<1>{});
    }
  });
}

}  // namespace

// qkv -> qkv, rotated
void rotary(const CudaKernelArguments& a) { submit(a, 1.0f); }

// dy -> dx
void rotary_gradient(const CudaKernelArguments& a) { submit(a, -1.0f); }

}  // namespace parplan
