// Products with packed matrices. Every output is one accumulator that takes the reduced dimension step by
// step, in order, whatever rows and columns are computed beside it: so its bits don't depend on them.
#pragma once

#include "simd.h"
#include "team.h"

namespace headwater {

// out[m][n * kLanes ...] = sum over all steps of a's row m with column vector n, for M rows and N vectors.
// The reduced dimension is `runs` runs of `steps` steps; a step takes kPair elements of each row (rows are lda
// apart) and one vector at columns(run, n) + step * stride.
template <class T, int M, int N, class Columns>
inline void dot_block(const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride, float* out,
                      int64_t ldo) {
  using E = Element<T>;
  Vec sums[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sums[m][n] = all(0.0f);
  for (int run = 0; run < runs; ++run, a += steps * E::kPair) {
    const T* at[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) at[n] = columns(run, n);
    for (int s = 0; s < steps; ++s) {
      typename E::Packed vectors[N];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) vectors[n] = E::packed(at[n] + s * stride);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const typename E::Packed row = E::broadcast(a + m * lda + s * E::kPair);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = E::dot(sums[m][n], row, vectors[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(out + m * ldo + n * kLanes, sums[m][n]);
}

// dot_block for a number of rows that is known at run time, 1 to Max.
template <class T, int Max, int N, class Columns>
inline void dot_rows(int rows, const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride,
                     float* out, int64_t ldo) {
  if constexpr (Max > 1)
    if (rows < Max) return dot_rows<T, Max - 1, N>(rows, a, lda, runs, steps, columns, stride, out, ldo);
  dot_block<T, Max, N>(a, lda, runs, steps, columns, stride, out, ldo);
}

// The same for any number of rows: blocks of at most Max rows and of like size, so that none is left with a
// single row.
template <class T, int Max, int N, class Columns>
inline void dot_all(int rows, const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride,
                    float* out, int64_t ldo) {
  const int blocks = (rows + Max - 1) / Max;
  for (int i = 0; i < blocks; ++i) {
    const int from = rows * i / blocks, count = rows * (i + 1) / blocks - from;
    dot_rows<T, Max, N>(count, a + from * lda, lda, runs, steps, columns, stride, out + from * ldo, ldo);
  }
}

// Rows of a, and vectors of columns of a weight matrix, that fill the registers: 24 of 32, or 12 of 16, sums.
constexpr int kRows = kLanes == 16 ? 8 : 4;
constexpr int kPanelVecs = 3;
constexpr int kPanel = kPanelVecs * kLanes;

// A weight [out, in], cut into panels of kPanel output columns (the last one padded with zeros), each
// [in / kPair, kPanel, kPair]. `bias` is fp32 [out padded to panels] or null.
struct Linear {
  const void* weight;
  const float* bias;
  int32_t out;
  int32_t in;
};

inline int panels(const Linear& linear) { return (linear.out + kPanel - 1) / kPanel; }

// `rows` rows (at most kRows) of a [rows, in] times one panel, bias added: block fp32 [rows, kPanel].
template <class T>
inline void panel_block(const Linear& linear, int panel, const T* a, int rows, float* block) {
  constexpr int kPair = Element<T>::kPair;
  const T* weight = static_cast<const T*>(linear.weight) + static_cast<int64_t>(panel) * kPanel * linear.in;
  const auto columns = [&](int, int n) { return weight + n * kLanes * kPair; };
  dot_rows<T, kRows, kPanelVecs>(rows, a, linear.in, 1, linear.in / kPair, columns, kPanel * kPair, block, kPanel);
  if (!linear.bias) return;
  for (int m = 0; m < rows; ++m)
    for (int c = 0; c < kPanel; c += kLanes)
      store(block + m * kPanel + c, add(load(block + m * kPanel + c), load(linear.bias + panel * kPanel + c)));
}

// done(panel, row, count) for every panel and block of rows. A panel stays in a core's cache for all blocks of a
// chunk of rows. Blocks are of like size, so that none has a single row.
constexpr int kChunk = 128;

template <class Done>
inline void each_block(Member& team, int panels, int rows, Done done) {
  const int chunks = (rows + kChunk - 1) / kChunk;
  team.each(chunks * panels, [&](int item) {
    const int chunk = item / panels, panel = item % panels;
    const int first = rows * chunk / chunks, count = rows * (chunk + 1) / chunks - first;
    const int blocks = (count + kRows - 1) / kRows;
    for (int i = 0; i < blocks; ++i) {
      const int from = count * i / blocks;
      done(panel, first + from, count * (i + 1) / blocks - from);
    }
  });
}

// Vectors of a panel that hold columns of the linear, as a number of columns.
inline int used_columns(const Linear& linear, int panel) {
  return std::min(kPanel, (linear.out - panel * kPanel + kLanes - 1) / kLanes * kLanes);
}

// out fp32 [rows, ldo] = x [rows, in] times the weight, or out += that.
template <class T, bool Add>
inline void multiply(Member& team, const Linear& linear, const T* x, int rows, float* out, int64_t ldo) {
  each_block(team, panels(linear), rows, [&](int panel, int row, int count) {
    alignas(64) float block[kRows * kPanel];
    panel_block(linear, panel, x + static_cast<int64_t>(row) * linear.in, count, block);
    const int columns = used_columns(linear, panel);
    for (int m = 0; m < count; ++m) {
      float* to = out + (row + m) * ldo + panel * kPanel;
      for (int c = 0; c < columns; c += kLanes) {
        const Vec value = load(block + m * kPanel + c);
        store(to + c, Add ? add(load(to + c), value) : value);
      }
    }
  });
}

// out [rows, gate.out] = silu(x gate) * (x up)
template <class T>
inline void multiply_gated(Member& team, const Linear& gate, const Linear& up, const T* x, int rows, T* out) {
  each_block(team, panels(gate), rows, [&](int panel, int row, int count) {
    alignas(64) float gates[kRows * kPanel], ups[kRows * kPanel];
    panel_block(gate, panel, x + static_cast<int64_t>(row) * gate.in, count, gates);
    panel_block(up, panel, x + static_cast<int64_t>(row) * up.in, count, ups);
    const int columns = used_columns(gate, panel);
    for (int m = 0; m < count; ++m)
      for (int c = 0; c < columns; c += kLanes)
        Element<T>::narrow(out + static_cast<int64_t>(row + m) * gate.out + panel * kPanel + c,
                           mul(silu(load(gates + m * kPanel + c)), load(ups + m * kPanel + c)));
  });
}

// root-mean-square norm of a row of `size` elements (a multiple of kLanes) times fp32 weights.
template <class T>
inline void rms_norm(const float* x, const float* weight, float eps, int size, T* out) {
  Vec squares = all(0.0f);
  for (int i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const Vec factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  for (int i = 0; i < size; i += kLanes)
    Element<T>::narrow(out + i, mul(mul(load(x + i), factor), load(weight + i)));
}

}  // namespace headwater
