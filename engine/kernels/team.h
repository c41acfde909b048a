// Threads that do the phases of a step together.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace headwater {

// The phases of one parallel region. A phase is over when all its items are done, not when all threads have
// arrived: a thread that the system has put aside is waited for only if it holds an item. So a busy neighbour
// costs a step what it takes, and not a time slice at each of hundreds of barriers.
class Phases {
 public:
  // At most `most` phases of at most `threads` threads.
  Phases(int most, int threads) : most_(most), lines_(threads / kCounters + 1), counters_(new Line[size()]) {}

  // Forget what is past; before a region, by one thread.
  void clear() {
    for (size_t i = 0; i < size(); ++i)
      for (std::atomic<int>& counter : counters_[i].of) counter.store(0, std::memory_order_relaxed);
  }
  int most() const { return most_; }

 private:
  friend class Member;
  static constexpr int kCounters = 16;
  struct alignas(64) Line {
    std::atomic<int> of[kCounters]{};
  };

  size_t size() const { return static_cast<size_t>(most_) * lines_; }
  // Counter 0 of a phase: its items that are done. Counter 1 + r: how many of run r have been claimed.
  std::atomic<int>& counter(int phase, int number) {
    return counters_[static_cast<size_t>(phase) * lines_ + number / kCounters].of[number % kCounters];
  }

  const int most_, lines_;
  std::unique_ptr<Line[]> counters_;
};

// One thread of a region. All members call the same phases in the same order.
class Member {
 public:
  explicit Member(Phases& phases)
      : phases_(phases), threads_(omp_get_num_threads()), number_(omp_get_thread_num()) {}

  int threads() const { return threads_; }

  // do_item(i) for each i below count, by whoever is free; returns when all are done.
  template <class Item>
  void each(int count, Item do_item) {
    take(0, 0, count, count, [&](int i, bool) { do_item(i); });
    wait(count);
  }

  // The same in runs: each thread begins with one of its own, and helps others when that is done. So it most likely
  // goes on with the next item: do_item(i, last) says whether there is none in the run.
  template <class Item>
  void each_run(int count, Item do_item) {
    for (int i = 0; i < threads_; ++i) {
      const int run = (number_ + i) % threads_;
      take(run, run_start(count, run), run_start(count, run + 1), count, do_item);
    }
    wait(count);
  }

  // Where this thread's run of `count` items begins.
  int run_start(int count) const { return run_start(count, number_); }

  // do_range(first, end) for pieces of [0, count), enough of them to keep all threads busy.
  template <class Range>
  void each_range(int count, Range do_range) {
    const int pieces = std::min(count, 4 * threads_);
    each(pieces, [&](int i) {
      do_range(static_cast<int>(static_cast<int64_t>(count) * i / pieces),
               static_cast<int>(static_cast<int64_t>(count) * (i + 1) / pieces));
    });
  }

 private:
  int run_start(int count, int run) const { return static_cast<int>(static_cast<int64_t>(count) * run / threads_); }

  // Do what is left of a run: items [first, end) of a phase of `count`.
  template <class Item>
  void take(int run, int first, int end, int count, Item do_item) {
    std::atomic<int> &claimed = phases_.counter(next_, 1 + run), &done = phases_.counter(next_, 0);
    for (int i; (i = first + claimed.fetch_add(1, std::memory_order_relaxed)) < end;) {
      do_item(i, i + 1 == end);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done.notify_all();
    }
  }

  // End the phase.
  void wait(int count) {
    const std::atomic<int>& done = phases_.counter(next_++, 0);
    int seen;
    for (int spins = 0; (seen = done.load(std::memory_order_acquire)) < count; ++spins) {
      if (spins < kSpins)
        _mm_pause();
      else
        done.wait(seen, std::memory_order_acquire);  // sleep: the one waited for may need this core
    }
  }

  // About 50 us: longer than any phase of a small step is out of balance.
  static constexpr int kSpins = 2000;
  Phases& phases_;
  const int threads_, number_;
  int next_ = 0;
};

}  // namespace headwater
