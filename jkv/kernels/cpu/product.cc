// Products of few rows with a weight of [out, in], read once and as it lies.
#include <algorithm>
#include <cmath>

#include "simd.h"

namespace jkv {
namespace {

namespace ffi = xla::ffi;

// Rows and outputs multiplied at once: their sums, with what they are made of, fill the registers.
constexpr int kRows = kRegisters == 32 ? 8 : 3;
constexpr int kOutputs = 3;
constexpr int64_t kDepth = 768;  // of rows that stay in the first cache
constexpr int64_t kPiece = 48;   // outputs that a thread takes at a time

struct Matrices {
  const float *x, *w;  // [rows, in], [out, in]
  float* y;            // [rows, out]
  int64_t rows, in, out;
};

// Adds products of the columns k ... k + depth - 1 to those before them. However many rows and outputs there
// are, one sum is made in the same order.
template <int M, int N>
void tile(const Matrices& a, int64_t row, int64_t output, int64_t k, int64_t depth) {
  const float* x = a.x + row * a.in + k;
  const float* w = a.w + output * a.in + k;
  Vec acc[N * M] = {};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    Vec weights[N];
    for (int n = 0; n < N; ++n) {
      weights[n] = load(w + n * a.in + d);
      __builtin_prefetch(w + (N + n) * a.in + d);
    }
    for (int m = 0; m < M; ++m) {
      Vec value = load(x + m * a.in + d);
      keep(value);
      for (int n = 0; n < N; ++n) acc[n * M + m] += weights[n] * value;
    }
  }
  constexpr int kSums = (N * M + kLanes - 1) / kLanes * kLanes;
  Vec all[kSums] = {};
  std::copy(acc, acc + N * M, all);
  float s[kSums];
  for (int i = 0; i < kSums; i += kLanes) store(s + i, sums(all + i));
  for (; d < depth; ++d) {
    for (int i = 0; i < N * M; ++i) s[i] = std::fma(w[i / M * a.in + d], x[i % M * a.in + d], s[i]);
  }
  for (int i = 0; i < N * M; ++i) {
    float* y = a.y + (row + i % M) * a.out + output + i / M;
    *y = k > 0 ? *y + s[i] : s[i];
  }
}

template <int N, int M = kRows>
void tile_of(int64_t rows, const Matrices& a, int64_t row, int64_t output, int64_t k, int64_t depth) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<N, M - 1>(rows, a, row, output, k, depth);
  }
  tile<M, N>(a, row, output, k, depth);
}

void multiply(const Matrices& a, int64_t first, int64_t last) {
  for (int64_t k = 0; k < a.in; k += kDepth) {
    int64_t depth = std::min(kDepth, a.in - k);
    for (int64_t row = 0; row < a.rows; row += kRows) {
      int64_t rows = std::min<int64_t>(kRows, a.rows - row), output = first;
      for (; output + kOutputs <= last; output += kOutputs) tile_of<kOutputs>(rows, a, row, output, k, depth);
      for (; output < last; ++output) tile_of<1>(rows, a, row, output, k, depth);
    }
  }
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                   ffi::ResultBuffer<ffi::F32> y) {
  Matrices a{x.typed_data(), w.typed_data(), y->typed_data(), x.dimensions()[0], x.dimensions()[1], w.dimensions()[0]};
  parallel_for(pool, (a.out + kPiece - 1) / kPiece, [&](int64_t i) {
    multiply(a, i * kPiece, std::min(a.out, (i + 1) * kPiece));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(jkv_product, jkv::Product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
