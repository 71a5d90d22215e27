#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

// The vocabulary may be split over ranks: this shard holds the columns of the tokens [begin, begin
// + columns), of which the first `valid` are no padding. Maxima and sums are reduced over the
// shards between the kernels. A negative target is none: its token has neither loss nor gradient.
// A block has one token; probabilities are never written.
namespace parplan {
namespace {

// Calls body(first column, Count<elements>) for the columns [0, valid) of a row: vectors first,
// then the rest one by one.
template <int width, class Body>
__device__ __forceinline__ void for_each_valid(std::int64_t valid, const Body& body) {
  const std::int64_t whole = valid / width * width;
#pragma unroll 4
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * width; i < whole;
       i += static_cast<std::int64_t>(blockDim.x) * width)
    body(i, Count<width>{});
  if constexpr (width > 1) {
    const std::int64_t last = whole + threadIdx.x;
    if (last < valid) body(last, Count<1>{});
  }
}

// Minus infinity on a shard that is all padding.
template <class T, int width>
__global__ void __launch_bounds__(1024)
    largest_of_row(const T* logits, float* maxima, std::int64_t columns, std::int64_t valid) {
  __shared__ float shared[1][most_warps];
  const std::int64_t row = blockIdx.x;
  const T* x = logits + row * columns;
  float largest = Maximum::identity;
  for_each_valid<width>(valid, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (const float value : values) largest = Maximum::of(largest, value);
  });
  largest = over_threads<Maximum>(largest, shared);
  if (threadIdx.x == 0) maxima[row] = largest;
}

template <class T, int width>
__global__ void __launch_bounds__(1024)
    sums_of_row(const T* logits, const std::int32_t* targets, const float* maxima, float* sums, std::int64_t columns,
                std::int64_t begin, std::int64_t valid) {
  __shared__ float shared[1][most_warps];
  const std::int64_t row = blockIdx.x;
  const T* x = logits + row * columns;
  const float maximum = maxima[row];
  float sum = 0.0f;
  for_each_valid<width>(valid, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (const float value : values) sum += expf(value - maximum);
  });
  sum = over_threads<Sum>(sum, shared);
  if (threadIdx.x != 0) return;
  const std::int64_t target = targets[row] - begin;
  sums[2 * row] = sum;
  sums[2 * row + 1] = target >= 0 && target < valid ? to_float(x[target]) - maximum : 0.0f;
}

constexpr int loss_threads = 1024;

// One block, in double precision: each thread adds every 1024th token, then halves are added to
// halves.
__global__ void __launch_bounds__(1024)
    add_losses(const std::int32_t* targets, const float* sums, std::int64_t rows, float* loss) {
  __shared__ double shared[loss_threads];
  const int thread = static_cast<int>(threadIdx.x);
  double total = 0.0;
  for (std::int64_t row = thread; row < rows; row += loss_threads)
    if (targets[row] >= 0) total += log(static_cast<double>(sums[2 * row])) - static_cast<double>(sums[2 * row + 1]);
  shared[thread] = total;
  for (int half = loss_threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] += shared[thread + half];
  }
  if (thread == 0) *loss += static_cast<float>(shared[0]);
}

// dlogits = (exp(x - max) / sum - [target]) scale, times the loss scale; padding gets 0. In place
// or not.
template <class T, int width>
__global__ void __launch_bounds__(1024)
    gradient_of_row(const T* logits, const std::int32_t* targets, const float* maxima, const float* sums, T* gradient,
                    const LossScale* loss_scale, float scale, std::int64_t columns, std::int64_t begin,
                    std::int64_t valid) {
  const std::int64_t row = blockIdx.x;
  const T* x = logits + row * columns;
  T* dx = gradient + row * columns;
  if (loss_scale != nullptr) scale *= loss_scale->scale;
  const float maximum = maxima[row];
  const float factor = targets[row] < 0 ? 0.0f : scale / sums[2 * row];
  const std::int64_t target = targets[row] < 0 ? -1 : targets[row] - begin;
  for_each_valid<width>(valid, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float values[n];
    load(x + i, values);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float share = expf(values[k] - maximum) * factor;
      values[k] = i + k == target ? share - scale : share;
    }
    store(dx + i, values);
  });
  for (std::int64_t i = valid + threadIdx.x; i < columns; i += blockDim.x) dx[i] = from_float<T>(0.0f);
}

// Calls submit(Count<width>, Grid): one block per row, with as many threads as have work, at most
// 1024.
template <class T, class Submit>
void submit_tokens(const OpShape& s, std::initializer_list<Array> arrays, const Submit& submit) {
  if (s.rows <= 0) return;
  const auto grid = [&](int width) {
    const int threads = whole_warps(divide_up(s.columns, width));
    return Grid{.blocks = dim3(rows_of_grid(s.rows)),
                .threads = dim3(static_cast<unsigned>(threads < 1024 ? threads : 1024))};
  };
  if (rows_can_move(vector_width<T>, s.columns, arrays)) {
    submit(Count<vector_width<T>>{}, grid(vector_width<T>));
  } else {
    submit(Count<1>{}, grid(1));
  }
}

}  // namespace

// logits -> maximum per token
void cross_entropy_max(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* logits = a.at<const T>(0);
    submit_tokens<T>(s, {logits}, [&](auto width, const Grid& grid) {
      launch("cross_entropy_max", largest_of_row<T, decltype(width)::width>, grid, a.stream, logits, a.at<float>(1),
             s.columns, s.valid);
    });
  });
}

// logits, targets, maximum -> per token {sum of exp(x - max), target's x - max if it is of this
// shard, else 0}
void cross_entropy_sums(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* logits = a.at<const T>(0);
    submit_tokens<T>(s, {logits}, [&](auto width, const Grid& grid) {
      launch("cross_entropy_sums", sums_of_row<T, decltype(width)::width>, grid, a.stream, logits,
             a.at<const std::int32_t>(1), a.at<const float>(2), a.at<float>(3), s.columns, s.begin, s.valid);
    });
  });
}

// logits, targets, maximum, sums -> loss += sum over tokens of log(sum) - target
void cross_entropy_loss(const CudaKernelArguments& a) {
  launch("cross_entropy_loss", add_losses, Grid{.blocks = dim3(1), .threads = dim3(loss_threads)}, a.stream,
         a.at<const std::int32_t>(1), a.at<const float>(3), a.shape.rows, a.at<float>(4));
}

// logits, targets, maximum, sums, -> dlogits, (loss scale)
void cross_entropy_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* logits = a.at<const T>(0);
    T* gradient = a.at<T>(4);
    const LossScale* loss_scale = s.scaled ? a.at<const LossScale>(5) : nullptr;
    submit_tokens<T>(s, {logits, gradient}, [&](auto width, const Grid& grid) {
      launch("cross_entropy_gradient", gradient_of_row<T, decltype(width)::width>, grid, a.stream, logits,
             a.at<const std::int32_t>(1), a.at<const float>(2), a.at<const float>(3), gradient, loss_scale,
             static_cast<float>(s.scale), s.columns, s.begin, s.valid);
    });
  });
}

}  // namespace parplan
