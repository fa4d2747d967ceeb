// Products of rows with a weight in panels. A sum adds the products of one input after the other, so that its
// bits depend neither on the other rows nor on how the work is cut.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "weights.h"

namespace jkv {
namespace {

namespace ffi = xla::ffi;

// What is multiplied at once: the sums fill the registers.
constexpr int kRows = kLanes == 16 ? 8 : kRegisters == 32 || kLanes == 8 ? 6 : 2;
constexpr int kPanels = kLanes == 16 ? 3 : 1;
// Up to kDirect rows, weights are decoded as they are multiplied; with more than kFew, those of fewer panels at
// once, so that there are registers for it.
constexpr int kDirect = 32, kFew = 4;
constexpr int kDirectRows = kLanes == 16 ? 8 : 4, kDirectPanels = kLanes == 16 ? 2 : 1;
// With more rows, those of so many inputs are decoded first: as much as stays in the second cache.
constexpr int64_t kDepth = 768;
constexpr int64_t kRowsOfPiece = 512;

struct Matrices {
  const float* x;         // [rows, in]
  const uint32_t* words;  // [panels, words_of(in), 16]
  float* y;               // [rows, out]
  int64_t rows, in, out;
  int64_t ahead;  // panels from one piece to that which the same thread is likely to get next

  template <typename E>
  const uint32_t* block(int64_t panel, int64_t input) const {
    return words + (panel * words_of<E>(in) + input / kBlock * kBlockWords<E>)*kPanel;
  }
};

// Brings a block's share of the thread's next panels into the second cache: a panel is too short for the
// processor to see that it is read in order, but of float32. Inlined by force: gcc drops a function that does
// nothing else.
template <typename E, int N>
__attribute__((always_inline)) inline void prefetch(const Matrices& a, int64_t panel, int64_t input) {
  if constexpr (std::is_same_v<E, Float32>) return;
  const uint32_t* next = a.block<E>(panel + a.ahead, 0) + input / kBlock * N * kBlockWords<E> * kPanel;
  for (int i = 0; i < N * kBlockWords<E>; ++i) __builtin_prefetch(next + i * kPanel, 0, 2);
}

// The sums of M rows and N panels, kept in y between two runs of inputs.
template <int M, int N>
struct Sums {
  Vec sums[M][N * kParts] = {};

  void load_from(const Matrices& a, int64_t row, int64_t panel) {
    each(a, row, panel, [](float* y, Vec& sum, int64_t bytes) { std::memcpy(&sum, y, bytes); });
  }

  void store_to(const Matrices& a, int64_t row, int64_t panel) {
    each(a, row, panel, [](float* y, Vec& sum, int64_t bytes) { std::memcpy(y, &sum, bytes); });
  }

 private:
  template <typename F>
  void each(const Matrices& a, int64_t row, int64_t panel, const F& f) {
    int64_t left = a.out - panel * kPanel;
    for (int m = 0; m < M; ++m) {
      float* y = a.y + (row + m) * a.out + panel * kPanel;
      if (left >= N * kPanel) {
        for (int n = 0; n < N * kParts; ++n) f(y + n * kLanes, sums[m][n], sizeof(Vec));
      } else {
        for (int n = 0; n * kLanes < left; ++n) {
          f(y + n * kLanes, sums[m][n], 4 * std::min<int64_t>(kLanes, left - n * kLanes));
        }
      }
    }
  }
};

template <typename E, int M, int N>
void multiply_direct(const Matrices& a, int64_t row, int64_t panel) {
  Sums<M, N> s;
  for (int64_t first = 0; first < a.in; first += kBlock) {
    prefetch<E, N>(a, panel, first);
    const uint32_t* words[N * kParts];
    Vec scales[N * kParts][E::kScales + 1];
    for (int n = 0; n < N * kParts; ++n) {
      const uint32_t* block = a.block<E>(panel + n / kParts, first);
      words[n] = block + n % kParts * kLanes;
      load_scales<E>(block, n % kParts * kLanes, scales[n]);
    }
    int count = words_in_pass<E>(a.in - first);
#pragma GCC unroll 2
    for (int pass = 0; pass < E::kPasses; ++pass) {
      for (int i = 0; i < count; ++i) {
        const float* x = a.x + row * a.in + first + (pass * count + i) * E::kCodes;
        Words w[N * kParts];
        for (int n = 0; n < N * kParts; ++n) w[n] = load_words(words[n] + i * kPanel);
#pragma GCC unroll 4
        for (int j = 0; j < E::kCodes; ++j) {
          Vec weights[N * kParts];
          for (int n = 0; n < N * kParts; ++n) weights[n] = E::decode(w[n], pass, j, scales[n]);
          for (int m = 0; m < M; ++m) {
            Vec value = broadcast(x[m * a.in + j]);
            keep(value);
            for (int n = 0; n < N * kParts; ++n) s.sums[m][n] += weights[n] * value;
          }
        }
      }
    }
  }
  s.store_to(a, row, panel);
}

// N panels' weights of `depth` inputs from `first` on, each panel's as [depth, 16].
template <typename E, int N>
void decode(const Matrices& a, int64_t panel, int64_t first, int64_t depth, float* out) {
  for (int64_t d = 0; d < depth; d += kBlock) {
    prefetch<E, N>(a, panel, first + d);
    int count = words_in_pass<E>(depth - d);
    for (int n = 0; n < N * kParts; ++n) {
      int part = n % kParts * kLanes;
      const uint32_t* block = a.block<E>(panel + n / kParts, first + d);
      float* to = out + (n / kParts * depth + d) * kPanel + part;
      Vec scales[E::kScales + 1];
      load_scales<E>(block, part, scales);
#pragma GCC unroll 2
      for (int pass = 0; pass < E::kPasses; ++pass) {
        for (int i = 0; i < count; ++i) {
          Words w = load_words(block + i * kPanel + part);
          float* outputs = to + (pass * count + i) * E::kCodes * kPanel;
#pragma GCC unroll 4
          for (int j = 0; j < E::kCodes; ++j) store(outputs + j * kPanel, E::decode(w, pass, j, scales));
        }
      }
    }
  }
}

// `weights` are those of `depth` inputs, the panels `stride` apart.
template <int M, int N>
void multiply_decoded(const Matrices& a, const float* weights, int64_t stride, int64_t row, int64_t panel,
                      int64_t first, int64_t depth) {
  const float* x = a.x + row * a.in + first;
  Sums<M, N> s;
  if (first > 0) s.load_from(a, row, panel);
  for (int64_t d = 0; d < depth; ++d) {
    Vec w[N * kParts];
    for (int n = 0; n < N * kParts; ++n) {
      w[n] = load(weights + n / kParts * stride + d * kPanel + n % kParts * kLanes);
    }
    for (int m = 0; m < M; ++m) {
      Vec value = broadcast(x[m * a.in + d]);
      keep(value);
      for (int n = 0; n < N * kParts; ++n) s.sums[m][n] += w[n] * value;
    }
  }
  s.store_to(a, row, panel);
}

// Calls f with the number, as a type, that `n` is: 1 ... Most.
template <int Most, typename F>
void with_number(int64_t n, const F& f) {
  if constexpr (Most > 1) {
    if (n < Most) return with_number<Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>());
}

template <typename E, int N>
void multiply_many(const Matrices& a, int64_t panel, int64_t first_row, int64_t last_row) {
  alignas(64) float decoded[std::is_same_v<E, Float32> ? 1 : kDepth * N * kPanel];
  for (int64_t first = 0; first < a.in; first += kDepth) {
    int64_t depth = std::min(kDepth, a.in - first), stride = depth * kPanel;
    const float* weights = decoded;
    if constexpr (std::is_same_v<E, Float32>) {
      weights = reinterpret_cast<const float*>(a.block<E>(panel, first));
      stride = a.in * kPanel;
    } else {
      decode<E, N>(a, panel, first, depth, decoded);
    }
    for (int64_t row = first_row; row < last_row; row += kRows) {
      with_number<kRows>(last_row - row, [&](auto m) {
        multiply_decoded<m, N>(a, weights, stride, row, panel, first, depth);
      });
    }
  }
}

template <typename E>
void multiply(ffi::ThreadPool pool, Matrices a) {
  int64_t panels = (a.out + kPanel - 1) / kPanel;
  bool direct = a.rows <= kDirect;
  int64_t of_piece = direct && a.rows > kFew ? kDirectPanels : kPanels;
  int64_t pieces = (panels + of_piece - 1) / of_piece, chunks = (a.rows + kRowsOfPiece - 1) / kRowsOfPiece;
  a.ahead = of_piece * pool.num_threads();
  parallel_for(pool, pieces * chunks, [&](int64_t i) {
    int64_t panel = i % pieces * of_piece;
    int64_t row = i / pieces * kRowsOfPiece, last_row = std::min(a.rows, row + kRowsOfPiece);
    with_number<kPanels>(std::min(of_piece, panels - panel), [&](auto n) {
      if (!direct) return multiply_many<E, n>(a, panel, row, last_row);
      constexpr int kAtOnce = n <= kDirectPanels ? kDirectRows : kFew;
      for (; row < last_row; row += kAtOnce) {
        with_number<kAtOnce>(last_row - row, [&](auto m) { multiply_direct<E, m, n>(a, row, panel); });
      }
    });
  });
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U32> words,
                   ffi::ResultBuffer<ffi::F32> y) {
  int64_t in = x.dimensions()[1], count = words.dimensions()[1];
  Matrices a{x.typed_data(), words.typed_data(), y->typed_data(), x.dimensions()[0], in, y->dimensions()[1], 0};
  if (count == words_of<Float32>(in)) {
    multiply<Float32>(pool, a);
  } else if (count == words_of<BFloat16>(in)) {
    multiply<BFloat16>(pool, a);
  } else if (count == words_of<Int8>(in)) {
    multiply<Int8>(pool, a);
  } else if (count == words_of<Int4>(in)) {
    multiply<Int4>(pool, a);
  } else {
    return ffi::Error::InvalidArgument("words of no known encoding");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(jkv_product, jkv::Product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
