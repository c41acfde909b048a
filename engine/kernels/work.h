// From the checked levels of a cascade plan to items of work.
#pragma once

#include "attention.h"

namespace headwater {

// One level: segment s holds rows [first[s], first[s] + rows[s]), which attend to the absolute tokens
// [start[s], start[s] + tokens[s]) in pages[page_indptr[s] ...]. The caller has checked all of it.
struct Segments {
  int64_t count;
  const int64_t *first, *rows, *start, *tokens, *page_indptr, *pages;
};

// Cuts levels into items. An item that folds all tiles of some rows of a segment at once keeps its state in cache;
// but where there are few rows, items of one tile each keep more threads busy, and their states are merged at
// the end. No bit depends on how it is cut.
class Cutter {
 public:
  Cutter(const KvPool& pool, int threads, const Segments* levels, int count, Work& work)
      : pool_(pool), work_(work), threads_(threads), group_(pool.heads / pool.kv_heads),
        block_(kBlockRows / group_), many_(block_ * std::max(1, (4 * threads + pool.kv_heads - 1) / pool.kv_heads)),
        folds_(work.rows, 0) {
    work.items.clear();
    work.merged.clear();
    work.states.assign(work.rows, 0);
    for (int i = 0; i + 1 < count; ++i) shared(levels[i]);
    own(levels[count - 1]);
    finish();
  }

 private:
  void shared(const Segments& level) {
    weigh(level);
    for (int64_t s = 0; s < level.count; ++s) {
      const int first = static_cast<int>(level.first[s]), end = first + static_cast<int>(level.rows[s]);
      const int tiles = static_cast<int>(level.tokens[s] / pool_.tile);
      if (!tiles || first == end) continue;
      const int block = can_fold(first, end) ? fold_block(end - first, tiles) : 0;
      const bool folds = block > 0;
      for (int row = first, count; row < end; row += count) {
        count = alike(row, std::min(end, row + (folds ? block : block_)));
        add({.row = row, .rows = count, .tile = tile_of(level, s), .tiles = tiles, .pages = pages_of(level, s)}, folds);
      }
    }
  }

  // The last level: a segment a sequence, causal. Its rows are cut at the edges of tiles as well.
  void own(const Segments& level) {
    weigh(level);
    for (int64_t s = 0; s < level.count; ++s) {
      const int first = static_cast<int>(level.first[s]), end = first + static_cast<int>(level.rows[s]);
      if (first == end) continue;
      const int block = own_block(first, end, work_.positions[end - 1] / pool_.tile - tile_of(level, s) + 1);
      const bool folds = block > 0;
      for (int row = first, count; row < end; row += count) {
        const int last = work_.positions[row] / pool_.tile, tile = tile_of(level, s);
        const int edge = row + (last + 1) * pool_.tile - work_.positions[row];
        count = alike(row, std::min({end, row + (folds ? block : block_), edge}));
        const bool final = folds || (last == tile && work_.states[row] == 0);
        add({.row = row, .rows = count, .tile = tile, .tiles = last - tile + 1, .final = final, .causal = true,
             .pages = pages_of(level, s), .own = true},
            folds);
        for (int r = row; r < row + count && !final; ++r) work_.merged.push_back(r);
      }
    }
  }

  // Order items by phase and lay out the states.
  void finish() {
    auto& items = work_.items;
    spread();
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.phase < b.phase; });
    work_.phases.assign(1, 0);
    for (size_t i = 1; i <= items.size(); ++i)
      if (i == items.size() || items[i].phase != items[i - 1].phase) work_.phases.push_back(static_cast<int>(i));
    int64_t states = 0;
    work_.base.resize(work_.rows);
    for (int row = 0; row < work_.rows; ++row) work_.base[row] = states, states += work_.states[row];
    const size_t count = static_cast<size_t>(states) * pool_.heads;
    if (work_.weights.size() < 2 * count) work_.weights.resize(2 * count), work_.values.resize(count * pool_.head_dim);
  }

  int tile_of(const Segments& level, int64_t s) const { return static_cast<int>(level.start[s] / pool_.tile); }
  static const int64_t* pages_of(const Segments& level, int64_t s) { return level.pages + level.page_indptr[s]; }

  // Spread private items evenly among shared ones: those of few rows are bound by memory and those of many by
  // arithmetic, so threads that do one of each at a time wait for neither.
  void spread() {
    auto& items = work_.items;
    if (std::all_of(items.begin(), items.end(), [](const Item& i) { return i.own; })) return;
    // Rows of one KV head and tile side by side: threads then read it together, and one of them from memory.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      if (a.own || b.own) return a.own < b.own;
      return a.pages != b.pages ? a.pages < b.pages : a.kv_head < b.kv_head;
    });
    const size_t shared = static_cast<size_t>(
        std::find_if(items.begin(), items.end(), [](const Item& i) { return i.own; }) - items.begin());
    const size_t own = items.size() - shared;
    std::vector<Item> mixed;
    mixed.reserve(items.size());
    for (size_t i = 0, a = 0, b = 0; i < items.size(); ++i)
      mixed.push_back(b * shared < a * own || a == shared ? items[shared + b++] : items[a++]);
    items.swap(mixed);
  }

  // What a thread takes for some rows of one KV head, in rows and tiles; below 8 rows it is bound by reading.
  int64_t cost(int64_t tiles, int64_t rows) const { return tiles * std::max<int64_t>(8, rows * group_); }

  void weigh(const Segments& level) {
    total_ = 0;
    for (int64_t s = 0; s < level.count; ++s)
      if (level.rows[s])
        total_ += pool_.kv_heads * cost((level.tokens[s] + pool_.tile - 1) / pool_.tile, level.rows[s]);
  }

  // Whether all that rows [first, end) have read so far has been folded: then their states can be gone on from.
  bool can_fold(int first, int end) const {
    for (int row = first; row < end; ++row)
      if (work_.states[row] > (folds_[row] ? 1 : 0)) return false;
    return true;
  }

  // How many of a segment's `rows` rows an item folds over all tiles of it; 0 for none. No item may take long against
  // a thread's share of the level.
  int fold_block(int rows, int tiles) const {
    for (int block = std::min(block_, rows);; block = (block + 1) / 2) {
      if (3 * threads_ * cost(tiles, block) <= total_) return block;
      if (block * group_ <= kManyRows || block == 1) return 0;
    }
  }

  // The same of the private level. To go on from a state takes a later phase: few rows do better side by side with
  // those that share, as long as there are some.
  int own_block(int first, int end, int tiles) const {
    if (!can_fold(first, end)) return 0;
    if (!work_.states[first]) return fold_block(end - first, tiles);
    return end - first >= many_ ? block_ : 0;
  }

  // How many rows from `row` on have come equally far.
  int alike(int row, int end) const {
    int next = row + 1;
    while (next < end && work_.states[next] == work_.states[row] && folds_[next] == folds_[row]) ++next;
    return next - row;
  }

  // Add an item for each KV head, and for each tile unless it folds, and count the states of its rows.
  void add(Item item, bool folds) {
    const int before = work_.states[item.row];
    item.carried = folds && before > 0;
    item.phase = folds ? folds_[item.row] : 0;
    item.slot = folds ? 0 : before;
    const int cuts = folds ? 1 : item.tiles, last = item.tile + item.tiles - 1;
    for (int cut = 0; cut < cuts; ++cut) {
      Item part = item;
      if (!folds) {
        part.tile = item.tile + cut, part.tiles = 1, part.slot = before + cut;
        part.pages = item.pages + static_cast<int64_t>(cut) * (pool_.tile / pool_.page_size);
        part.causal = item.causal && part.tile == last;
      }
      for (part.kv_head = 0; part.kv_head < pool_.kv_heads; ++part.kv_head) work_.items.push_back(part);
    }
    const int states = folds ? std::max(before, item.final ? 0 : 1) : item.final ? 0 : before + item.tiles;
    for (int row = item.row; row < item.row + item.rows; ++row) {
      work_.states[row] = states;
      if (folds) ++folds_[row];
    }
  }

  const KvPool& pool_;
  Work& work_;
  const int threads_, group_, block_, many_;
  int64_t total_ = 0;  // cost of the level that is being cut
  std::vector<int> folds_;  // how many levels a row has folded
};

}  // namespace headwater
