// Attention over paged KV, tile by tile: the same bits for a row whatever stands beside it.
//
// KV are reduced in tiles cut at absolute multiples of `tile` tokens. Each (row, head, tile) gives a partial
// state: the values weighted by 2^(score - max), their weights' sum, and max (scores are in base 2). States are
// folded in ascending order. Whether a state is folded at once or kept until all are there, whoever shares the
// tile, and which thread does it, changes nothing: it is the same sequence of roundings.
//
// The fold is the online softmax of Milakov and Gimelshein (2018), over tiles instead of elements.
#pragma once

#include <vector>

#include "gemm.h"

namespace headwater {

// Query rows (of all heads of a group) that a thread holds scores of at a time: with 256-token tiles, 48 KB.
constexpr int kBlockRows = 48;
// Packed query rows from which on a tile takes longer to compute than to read.
constexpr int kManyRows = 12;
// Rows and vectors of keys or values that fill the registers.
constexpr int kScoreRows = kLanes == 16 ? 6 : 3;
constexpr int kScoreVecs = kLanes == 16 ? 4 : 3;

// The KV memory of one executor. A page of a layer is [kv_heads, 2, page_size * head_dim]: keys as
// [page_size / kLanes, head_dim / kPair, kLanes, kPair], values as [page_size / kPair, head_dim, kPair].
struct KvPool {
  void* const* layers;
  int32_t page_size;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t tile;
  float scale;
};

template <class T>
struct Pages {
  static constexpr int kPair = Element<T>::kPair;
  T* base;
  int64_t size;  // of the keys, or the values, of one page and head
  int page_size, kv_heads, head_dim;

  Pages(const KvPool& pool, int layer)
      : base(static_cast<T*>(pool.layers[layer])), size(static_cast<int64_t>(pool.page_size) * pool.head_dim),
        page_size(pool.page_size), kv_heads(pool.kv_heads), head_dim(pool.head_dim) {}
  T* keys(int64_t page, int head) const { return base + (page * kv_heads + head) * 2 * size; }
  T* values(int64_t page, int head) const { return keys(page, head) + size; }
  // Places of element d of the token at `offset` in its page.
  int64_t key_at(int offset, int d) const {
    return (static_cast<int64_t>(offset / kLanes) * (head_dim / kPair) + d / kPair) * kLanes * kPair +
           offset % kLanes * kPair + d % kPair;
  }
  int64_t value_at(int offset, int d) const {
    return (static_cast<int64_t>(offset / kPair) * head_dim + d) * kPair + offset % kPair;
  }
  void write(int64_t slot, int head, const T* key, const T* value) const {
    T *k = keys(slot / page_size, head), *v = values(slot / page_size, head);
    const int offset = static_cast<int>(slot % page_size);
    T *k0 = k + key_at(offset, 0), *v0 = v + value_at(offset, 0);
    for (int d = 0; d < head_dim; d += kPair)
      std::memcpy(k0 + static_cast<int64_t>(d) * kLanes, key + d, kPair * sizeof(T));
    for (int d = 0; d < head_dim; ++d) v0[d * kPair] = value[d];
  }
};

// Rows [row, row + rows) of the step attend, with the query heads of one KV head, to `tiles` tiles from `tile`
// on, whose pages begin at `pages`. The states are folded into one, which goes on from state `slot` of each row
// if `carried`, and is the result if `final`, else state `slot` of each row. In the last tile a row sees tokens
// up to its own position if `causal`.
struct Item {
  int32_t row, rows, kv_head = 0, tile, tiles, slot = 0;
  bool carried = false, final = false, causal = false;
  const int64_t* pages;
  int32_t phase = 0;  // items that carry on run after those that left them something
  bool own = false;   // of the private level
};

// The work of a step's attention, and where its partial states lie: state s of row r and head h is number
// (base[r] + s) * heads + h. Items of phase p are [phases[p], phases[p + 1]).
struct Work {
  int rows = 0;
  const int32_t* positions = nullptr;
  std::vector<Item> items;
  std::vector<int> phases;
  std::vector<int64_t> base;
  std::vector<int32_t> states;
  std::vector<int32_t> merged;  // rows whose result is folded from their states at the end
  std::vector<float> values, weights;
};

// What one thread needs. `vectors` holds where each vector of the keys of a tile, and of the next one, begins; the
// values of the same tokens begin one page's keys later.
struct Scratch {
  std::vector<float> scores, sums, tile_sums, peaks, totals;
  std::vector<uint8_t> probabilities;
  std::vector<const void*> vectors;

  // Elements from one row of scores to the next: not a power of two, so that rows don't share cache sets.
  static int64_t row(const KvPool& pool) { return pool.tile + 2 * kLanes; }

  void fit(const KvPool& pool, size_t element) {
    scores.resize(static_cast<size_t>(kBlockRows) * row(pool));
    probabilities.resize(static_cast<size_t>(kBlockRows) * row(pool) * element);
    sums.resize(static_cast<size_t>(kBlockRows) * pool.head_dim);
    tile_sums.resize(sums.size());
    vectors.resize(2 * pool.tile / kLanes);
    peaks.resize(kBlockRows);
    totals.resize(kBlockRows);
  }
};

// Fold a state (sums, peak, total) onto another one that covers earlier tiles.
inline void fold(float* sums, float& peak, float& total, const float* other, float other_peak, float other_total,
                 int head_dim) {
  const float both = other_peak > peak ? other_peak : peak;
  const Vec keep = exp2<6>(all(peak - both)), take = exp2<6>(all(other_peak - both));
  float factor[2][kLanes];
  store(factor[0], keep);
  store(factor[1], take);
  total = std::fma(other_total, factor[1][0], total * factor[0][0]);
  peak = both;
  for (int d = 0; d < head_dim; d += kLanes)
    store(sums + d, fma(load(other + d), take, mul(load(sums + d), keep)));
}

template <class T>
inline void finish(const float* sums, float total, T* out, int head_dim) {
  const Vec divisor = all(total);
  for (int d = 0; d < head_dim; d += kLanes) Element<T>::narrow(out + d, div(load(sums + d), divisor));
}

// call(width, first) for vectors [first, first + width) of `count`, as many at a time as the registers hold.
template <class Call>
inline void each_span(int count, Call call) {
  int n = 0;
  for (; n + kScoreVecs <= count; n += kScoreVecs) call(std::integral_constant<int, kScoreVecs>{}, n);
  for (; n + 2 <= count; n += 2) call(std::integral_constant<int, 2>{}, n);
  for (; n < count; ++n) call(std::integral_constant<int, 1>{}, n);
}

// A source for score(): the values of the keys that it reads, `offset` bytes behind them.
template <class T>
struct Values {
  int64_t offset;
  int head_dim;
  int lines = 0;  // of each vector, a time

  int64_t all() const { return static_cast<int64_t>(kLanes) * head_dim * sizeof(T) / kLine; }
  Values part(int i, int n) const {
    const int64_t first = all() * i / n, count = all() * (i + 1) / n - first;
    const int groups = head_dim / Element<T>::kPair / kGroup;
    return {offset + first * kLine, head_dim, static_cast<int>((count + groups - 1) / groups)};
  }
  void fetch(int, int, const T* const* keys, int n) {
    for (int i = 0; i < lines; ++i, offset += kLine)
      for (int v = 0; v < n; ++v) _mm_prefetch(reinterpret_cast<const char*>(keys[v]) + offset, _MM_HINT_T1);
  }
};

// A source for weigh(), a run of which is a vector of tokens: the same vector of keys of the next tile.
template <class T>
struct NextKeys {
  const T* const* keys;
  int vecs, head_dim;
  int64_t first = 0, lines = 0;  // of each vector

  NextKeys part(int i, int n) const {
    const int64_t all = static_cast<int64_t>(kLanes) * head_dim * sizeof(T) / kLine, from = all * i / n;
    return {keys, vecs, head_dim, from, all * (i + 1) / n - from};
  }
  void fetch(int run, int step, const T* const*, int) {
    if (step || run >= vecs) return;
    const char* at = reinterpret_cast<const char*>(keys[run]) + first * kLine;
    for (int i = 0; i < lines; ++i) _mm_prefetch(at + i * kLine, _MM_HINT_T1);
  }
};

// Scores of `rows` packed query rows [rows, head_dim] with `vecs` vectors of keys.
template <class T, class Source>
inline void score(const T* const* keys, int vecs, const T* q, int rows, int head_dim, float* out, int64_t ldo,
                  Source source) {
  constexpr int kPair = Element<T>::kPair;
  each_span(vecs, [&](auto width, int first) {
    const auto columns = [&](int, int n) { return keys[first + n]; };
    dot_all<T, kScoreRows, decltype(width)::value>(rows, q, head_dim, 1, head_dim / kPair, columns, kLanes * kPair,
                                                   out + first * kLanes, ldo, source);
  });
}

// One row's scores to probabilities: 2^(scale2 * score - peak), 0 from token `visible` on.
template <class T>
inline void soften(const float* scores, int vecs, int visible, float scale2, T* out, float& peak, float& total) {
  constexpr float kNone = -INFINITY;
  Vec highest = all(kNone);
  for (int v = 0; v < vecs; ++v) {
    Vec s = load(scores + v * kLanes);
    if (visible < (v + 1) * kLanes) s = keep_first(s, std::max(visible - v * kLanes, 0), all(kNone));
    highest = larger(highest, s);
  }
  peak = maximum(highest) * scale2;
  const Vec scale = all(scale2), offset = all(-peak);
  Vec sums = all(0.0f);
  for (int v = 0; v < vecs; ++v) {
    Vec p = exp2<Element<T>::kExpDegree>(fma(load(scores + v * kLanes), scale, offset));
    if (visible < (v + 1) * kLanes) p = keep_first(p, std::max(visible - v * kLanes, 0), all(0.0f));
    sums = add(sums, p);
    Element<T>::narrow(out + v * kLanes, p);
  }
  total = sum(sums);
}

// Values of `vecs` vectors of tokens, `offset` behind their keys, weighted by p [rows, ldp]: out [rows, head_dim].
template <class T, class Source>
inline void weigh(const T* const* keys, int64_t offset, int vecs, const T* p, int64_t ldp, int rows, int head_dim,
                  float* out, Source source) {
  constexpr int kPair = Element<T>::kPair;
  each_span(head_dim / kLanes, [&](auto width, int first) {
    const auto columns = [&](int v, int n) { return keys[v] + offset + (first + n) * kLanes * kPair; };
    dot_all<T, kScoreRows, decltype(width)::value>(rows, p, ldp, vecs, kLanes / kPair, columns, head_dim * kPair,
                                                   out + first * kLanes, head_dim, source);
  });
}

// Do one item. q is [kv_heads, rows of the step, group, head_dim], out [rows of the step, heads, head_dim].
template <class T>
inline void attend_item(const KvPool& pool, const Pages<T>& kv, Work& work, const Item& item, const T* q,
                        Scratch& scratch, T* out) {
  const int group = pool.heads / pool.kv_heads, packed = item.rows * group, dim = pool.head_dim;
  const int per_tile = pool.tile / pool.page_size, per_page = pool.page_size / kLanes;
  const T* queries = q + (static_cast<int64_t>(item.kv_head) * work.rows + item.row) * group * dim;
  T* p = reinterpret_cast<T*>(scratch.probabilities.data());
  const int64_t ld = Scratch::row(pool);
  const auto state = [&](int j) {  // of packed row j
    return (work.base[item.row + j / group] + item.slot) * pool.heads + item.kv_head * group + j % group;
  };
  if (item.carried)
    for (int j = 0; j < packed; ++j) {
      std::memcpy(&scratch.sums[j * dim], &work.values[state(j) * dim], dim * sizeof(float));
      scratch.peaks[j] = work.weights[state(j) * 2];
      scratch.totals[j] = work.weights[state(j) * 2 + 1];
    }
  // Fill in where the vectors of a tile's keys begin; returns how many there are.
  const auto place = [&](int t, const T** keys) {
    const bool causal = item.causal && t == item.tiles - 1;
    const int seen = causal ? work.positions[item.row + item.rows - 1] % pool.tile + 1 : pool.tile;
    const int vecs = (seen + kLanes - 1) / kLanes;
    const int64_t* pages = item.pages + static_cast<int64_t>(t) * per_tile;
    for (int v = 0; v < vecs; ++v)
      keys[v] = kv.keys(pages[v / per_page], item.kv_head) + v % per_page * kLanes * dim;
    return vecs;
  };
  const T** keys = reinterpret_cast<const T**>(scratch.vectors.data());
  const T** next = keys + pool.tile / kLanes;
  int vecs = place(0, keys);
  for (int t = 0; t < item.tiles; ++t) {
    const bool causal = item.causal && t == item.tiles - 1;
    // Many rows are bound by arithmetic: what comes next is fetched meanwhile. With few rows memory is the limit
    // already, and what the hardware fetches by itself comes sooner.
    if (packed >= kManyRows)
      score(keys, vecs, queries, packed, dim, scratch.scores.data(), ld,
            Values<T>{kv.size * static_cast<int64_t>(sizeof(T)), dim});
    else
      score(keys, vecs, queries, packed, dim, scratch.scores.data(), ld, Nothing());
    const bool first = t == 0 && !item.carried;
    float peaks[kBlockRows], totals[kBlockRows];
    for (int j = 0; j < packed; ++j) {
      const int visible = causal ? work.positions[item.row + j / group] % pool.tile + 1 : pool.tile;
      soften(&scratch.scores[j * ld], vecs, visible, pool.scale * 1.44269504f,
             p + j * ld, first ? scratch.peaks[j] : peaks[j],
             first ? scratch.totals[j] : totals[j]);
    }
    float* sums = first ? scratch.sums.data() : scratch.tile_sums.data();
    const int coming = t + 1 < item.tiles ? place(t + 1, next) : 0;
    if (packed >= kManyRows)
      weigh(keys, kv.size, vecs, p, ld, packed, dim, sums, NextKeys<T>{next, coming, dim});
    else
      weigh(keys, kv.size, vecs, p, ld, packed, dim, sums, Nothing());
    if (!first)
      for (int j = 0; j < packed; ++j)
        fold(&scratch.sums[j * dim], scratch.peaks[j], scratch.totals[j], sums + j * dim, peaks[j], totals[j], dim);
    std::swap(keys, next), vecs = coming;
  }
  for (int j = 0; j < packed; ++j) {
    if (item.final) {
      const int64_t row = item.row + j / group;
      finish(&scratch.sums[j * dim], scratch.totals[j],
             out + (row * pool.heads + item.kv_head * group + j % group) * dim, dim);
    } else {
      std::memcpy(&work.values[state(j) * dim], &scratch.sums[j * dim], dim * sizeof(float));
      work.weights[state(j) * 2] = scratch.peaks[j];
      work.weights[state(j) * 2 + 1] = scratch.totals[j];
    }
  }
}

// Fold the states of one row and head into its result.
template <class T>
inline void merge_row(const KvPool& pool, const Work& work, int row, int head, T* out) {
  const int dim = pool.head_dim;
  float sums[256];
  float peak = 0.0f, total = 0.0f;
  for (int s = 0; s < work.states[row]; ++s) {
    const int64_t at = (work.base[row] + s) * pool.heads + head;
    const float *values = &work.values[at * dim], *weight = &work.weights[at * 2];
    if (s == 0) {
      std::memcpy(sums, values, dim * sizeof(float));
      peak = weight[0], total = weight[1];
    } else {
      fold(sums, peak, total, values, weight[0], weight[1], dim);
    }
  }
  finish(sums, total, out + (static_cast<int64_t>(row) * pool.heads + head) * dim, dim);
}

// All of a step's attention in one layer.
template <class T>
inline void attend_all(Member& team, const KvPool& pool, int layer, Work& work, const T* q, Scratch& scratch, T* out) {
  const Pages<T> kv(pool, layer);
  for (size_t phase = 0; phase + 1 < work.phases.size(); ++phase) {
    const int first = work.phases[phase];
    team.each(work.phases[phase + 1] - first, [&](int i) {
      attend_item(pool, kv, work, work.items[first + i], q, scratch, out);
    });
  }
  if (work.merged.empty()) return;
  team.each_range(static_cast<int>(work.merged.size()) * pool.heads, [&](int from, int end) {
    for (int i = from; i < end; ++i) merge_row(pool, work, work.merged[i / pool.heads], i % pool.heads, out);
  });
}

}  // namespace headwater
