// Products with packed matrices. Every output is one accumulator that takes the reduced dimension step by
// step, in order, whatever rows and columns are computed beside it: so its bits don't depend on them.
#pragma once

#include "simd.h"
#include "team.h"

namespace headwater {

// What is read next is fetched into the second-level cache while a product computes, a few cache lines every kGroup
// steps: all lines at once would hold up the product's own reads. A source says which lines: fetch(run, step, at, n) is
// called at a step of a run, whose n vectors begin at `at`. Those of dot_all have part(i, n): what to fetch beside
// block i of n blocks.
constexpr int kGroup = 8, kLine = 64;

// Nothing, where the hardware fetches as well by itself.
struct Nothing {
  Nothing part(int, int) const { return {}; }
  template <class T>
  void fetch(int, int, const T* const*, int) {}
};

// `lines` lines a time, from `at` on.
struct Ahead {
  const char* at = nullptr;
  int lines = 0;

  template <class T>
  void fetch(int, int, const T* const*, int) {
    for (int i = 0; i < lines; ++i, at += kLine) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// out[m][n * kLanes ...] = sum over all steps of a's row m with column vector n, for M rows and N vectors.
// The reduced dimension is `runs` runs of `steps` steps; a step takes kPair elements of each row (rows are lda
// apart) and one vector at columns(run, n) + step * stride. `steps` is a multiple of kGroup; see above for `source`.
template <class T, int M, int N, class Columns, class Source>
inline void dot_block(const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride, float* out,
                      int64_t ldo, Source source) {
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
      if (s % kGroup == 0) source.fetch(run, s, at, N);
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
template <class T, int Max, int N, class Columns, class Source>
inline void dot_rows(int rows, const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride,
                     float* out, int64_t ldo, Source source) {
  if constexpr (Max > 1)
    if (rows < Max) return dot_rows<T, Max - 1, N>(rows, a, lda, runs, steps, columns, stride, out, ldo, source);
  dot_block<T, Max, N>(a, lda, runs, steps, columns, stride, out, ldo, source);
}

// The same for any number of rows: blocks of at most Max rows and of like size, so that none is left with a
// single row.
template <class T, int Max, int N, class Columns, class Source>
inline void dot_all(int rows, const T* a, int64_t lda, int runs, int steps, Columns columns, int64_t stride,
                    float* out, int64_t ldo, Source source) {
  const int blocks = (rows + Max - 1) / Max;
  for (int i = 0; i < blocks; ++i) {
    const int from = rows * i / blocks, count = rows * (i + 1) / blocks - from;
    dot_rows<T, Max, N>(count, a + from * lda, lda, runs, steps, columns, stride, out + from * ldo, ldo,
                        source.part(i, blocks));
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

// A run of memory.
struct Span {
  const char* at = nullptr;
  int64_t bytes = 0;

  // The part-th of `parts` pieces of it, fetched during a product over `in` elements.
  template <class T>
  Ahead piece(int part, int parts, int in) const {
    const int64_t lines = bytes / kLine, first = lines * part / parts, count = lines * (part + 1) / parts - first;
    const int groups = in / Element<T>::kPair / kGroup;
    return {at + first * kLine, static_cast<int>((count + groups - 1) / groups)};
  }
};

template <class T>
inline const T* panel_at(const Linear& linear, int panel) {
  return static_cast<const T*>(linear.weight) + static_cast<int64_t>(panel) * kPanel * linear.in;
}

template <class T>
inline Span panel_span(const Linear& linear, int panel) {
  const T *from = panel_at<T>(linear, panel), *end = panel_at<T>(linear, panel + 1);
  return {reinterpret_cast<const char*>(from), (end - from) * static_cast<int64_t>(sizeof(T))};
}

// `rows` rows (at most kRows) of a [rows, in] times one panel, bias added: block fp32 [rows, kPanel].
template <class T>
inline void panel_block(const Linear& linear, int panel, const T* a, int rows, float* block, Ahead ahead) {
  constexpr int kPair = Element<T>::kPair;
  const T* weight = panel_at<T>(linear, panel);
  const auto columns = [&](int, int n) { return weight + n * kLanes * kPair; };
  dot_rows<T, kRows, kPanelVecs>(rows, a, linear.in, 1, linear.in / kPair, columns, kPanel * kPair, block, kPanel,
                                 ahead);
  if (!linear.bias) return;
  for (int m = 0; m < rows; ++m)
    for (int c = 0; c < kPanel; c += kLanes)
      store(block + m * kPanel + c, add(load(block + m * kPanel + c), load(linear.bias + panel * kPanel + c)));
}

// A piece of a product: rows [row, row + rows) of one panel, piece `part` of the `parts` that this panel takes,
// and the panel that this thread most likely does next, -1 where its run of them ends.
struct Piece {
  int panel, row, rows, part, parts, next;
};

// done(piece) for every panel and block of rows. A panel stays in a core's cache for all blocks of a chunk of
// rows. Blocks are of like size, so that none has a single row.
constexpr int kChunk = 128;

template <class Done>
inline void each_block(Member& team, int panels, int rows, Done done) {
  const int chunks = (rows + kChunk - 1) / kChunk;
  team.each_run(chunks * panels, [&](int item, bool last) {
    const int chunk = item / panels, panel = item % panels;
    const int first = rows * chunk / chunks, count = rows * (chunk + 1) / chunks - first;
    const int blocks = (count + kRows - 1) / kRows;
    for (int i = 0; i < blocks; ++i) {
      const int from = count * i / blocks;
      const int next = last ? -1 : (panel + 1) % panels;
      done(Piece{panel, first + from, count * (i + 1) / blocks - from, i, blocks, next});
    }
  });
}

// The panel of a linear that a thread begins with.
template <class T>
inline Span first_panel(const Member& team, const Linear& linear, int rows) {
  const int chunks = (rows + kChunk - 1) / kChunk, count = panels(linear);
  return panel_span<T>(linear, team.run_start(chunks * count) % count);
}

// What to fetch during a piece of a product with `linear`: the next panel of it, or `then` after the last one. Where
// a piece is several products, this is the number-th. A single block takes no longer than its panel takes to be
// read, so nothing is fetched beside it.
template <class T>
inline Ahead ahead_of(const Linear& linear, const Piece& piece, const Span& then, int number = 0, int products = 1) {
  if (piece.parts == 1) return {};
  if (piece.next >= 0) return panel_span<T>(linear, piece.next).template piece<T>(piece.part, piece.parts, linear.in);
  return then.template piece<T>(piece.part * products + number, piece.parts * products, linear.in);
}

// Vectors of a panel that hold columns of the linear, as a number of columns.
inline int used_columns(const Linear& linear, int panel) {
  return std::min(kPanel, (linear.out - panel * kPanel + kLanes - 1) / kLanes * kLanes);
}

// out fp32 [rows, ldo] = x [rows, in] times the weight, or out += that. `then` is read after it by this thread.
template <class T, bool Add>
inline void multiply(Member& team, const Linear& linear, const T* x, int rows, float* out, int64_t ldo,
                     Span then = {}) {
  each_block(team, panels(linear), rows, [&](const Piece& piece) {
    alignas(64) float block[kRows * kPanel];
    panel_block(linear, piece.panel, x + static_cast<int64_t>(piece.row) * linear.in, piece.rows, block,
                ahead_of<T>(linear, piece, then));
    const int columns = used_columns(linear, piece.panel);
    for (int m = 0; m < piece.rows; ++m) {
      float* to = out + (piece.row + m) * ldo + piece.panel * kPanel;
      for (int c = 0; c < columns; c += kLanes) {
        const Vec value = load(block + m * kPanel + c);
        store(to + c, Add ? add(load(to + c), value) : value);
      }
    }
  });
}

// out [rows, gate.out] = silu(x gate) * (x up). `then` is read after it by this thread.
template <class T>
inline void multiply_gated(Member& team, const Linear& gate, const Linear& up, const T* x, int rows, T* out,
                           Span then) {
  each_block(team, panels(gate), rows, [&](const Piece& piece) {
    alignas(64) float gates[kRows * kPanel], ups[kRows * kPanel];
    const T* from = x + static_cast<int64_t>(piece.row) * gate.in;
    panel_block(gate, piece.panel, from, piece.rows, gates, ahead_of<T>(gate, piece, then, 0, 2));
    panel_block(up, piece.panel, from, piece.rows, ups, ahead_of<T>(up, piece, then, 1, 2));
    const int columns = used_columns(gate, piece.panel);
    for (int m = 0; m < piece.rows; ++m)
      for (int c = 0; c < columns; c += kLanes)
        Element<T>::narrow(out + static_cast<int64_t>(piece.row + m) * gate.out + piece.panel * kPanel + c,
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
