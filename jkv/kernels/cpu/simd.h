// Vectors of the processor's width, and work shared by the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jkv {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Keeps a vector that several products share in a register: gcc would load it for each.
inline void keep(Vec& v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
}

inline Vec broadcast(float x) { return x - Vec{}; }  // adding would make -0 into 0, and cost an addition

inline Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }

inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }

template <int D, int... I>
inline Vec lower(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & D ? kLanes + I - D : I)...);
}

template <int D, int... I>
inline Vec upper(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & D ? kLanes + I : I + D)...);
}

constexpr auto kIndices = std::make_integer_sequence<int, kLanes>();

// Lane i has what f, of two vectors lane by lane, makes of all lanes of v[i].
template <int D = 1, typename F>
inline Vec reduce(const Vec* v, const F& f) {
  if constexpr (D == kLanes) {
    return v[0];
  } else {
    Vec half[kLanes / D / 2];
    for (int i = 0; i < kLanes / D / 2; ++i) {
      half[i] = f(lower<D>(v[2 * i], v[2 * i + 1], kIndices), upper<D>(v[2 * i], v[2 * i + 1], kIndices));
    }
    return reduce<D * 2>(half, f);
  }
}

inline Vec sums(const Vec* v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}

inline Vec maxima(const Vec* v) { return reduce(v, vmax); }

// What f, as in reduce, makes of all lanes of one vector.
template <int D = kLanes / 2, typename F>
inline float across(Vec v, const F& f) {
  v = f(lower<D>(v, v, kIndices), upper<D>(v, v, kIndices));
  if constexpr (D == 1) {
    return v[0];
  } else {
    return across<D / 2>(v, f);
  }
}

inline float sum(Vec v) {
  return across(v, [](Vec a, Vec b) { return a + b; });
}

inline float largest(Vec v) { return across(v, vmax); }

// Rows become columns: blocks beside the diagonal change places, of one lane, then of two ...
template <int D = 1>
inline void transpose(Vec* v) {
  if constexpr (D < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if (i & D) continue;
      Vec a = v[i], b = v[i + D];
      v[i] = lower<D>(a, b, kIndices);
      v[i + D] = upper<D>(a, b, kIndices);
    }
    transpose<D * 2>(v);
  }
}

template <int... I>
constexpr IntVec iota(std::integer_sequence<int, I...>) {
  return IntVec{I...};
}
constexpr IntVec kIota = iota(std::make_integer_sequence<int, kLanes>());

// e^x to about 1e-7, 0 below -87: x = n ln2 + r, a polynomial of r (Cephes' expf), n put into the exponent.
inline Vec exponential(Vec x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  Vec lowest = broadcast(-87.0f);
  Vec c = vmax(x, lowest);
  Vec t = c * 1.44269504088896341f + magic;
  Vec n = t - magic;
  Vec r = c - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec bits = (IntVec)t << 23;  // the magic number's own bits leave at the top, but for 127's place
  Vec y = (Vec)((IntVec)p + bits);
  return select(x < lowest, Vec{}, y);
}

// Runs work(0) ... work(n - 1) on the calling thread and on those of the pool that come in time. Pieces are
// handed out one by one: a thread that is late, or that loses its core to another, holds up one piece only.
template <typename Work>
void parallel_for(xla::ffi::ThreadPool pool, int64_t n, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    int64_t n;
    const Work* work;

    void run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        (*work)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->n = n;
  shared->work = &work;  // outlives the call: nobody uses it once all pieces are handed out and done
  int64_t helpers = std::min(n, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->run(); });
  shared->run();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < n; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace jkv
