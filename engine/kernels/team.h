// Threads that do the phases of a step together.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace headwater {

// The phases of one parallel region. A phase is over when all its items are done, not when all threads have
// arrived: a thread that the system has put aside is waited for only if it holds an item. So a busy neighbour
// costs a step what it takes, and not a time slice at each of hundreds of barriers.
class Phases {
 public:
  explicit Phases(int most) : slots_(new Slot[most]), most_(most) {}

  // Forget what is past; before a region, by one thread.
  void clear() {
    for (int i = 0; i < most_; ++i) slots_[i].claimed.store(0, std::memory_order_relaxed), slots_[i].done.store(0);
  }
  int most() const { return most_; }

 private:
  friend class Member;
  struct alignas(64) Slot {
    std::atomic<int> claimed{0};
    std::atomic<int> done{0};
  };
  std::unique_ptr<Slot[]> slots_;
  int most_;
};

// One thread of a region. All members call the same phases in the same order.
class Member {
 public:
  explicit Member(Phases& phases) : phases_(phases), threads_(omp_get_num_threads()) {}

  int threads() const { return threads_; }

  // do_item(i) for each i below count, by whoever is free; returns when all are done.
  template <class Item>
  void each(int count, Item do_item) {
    Phases::Slot& slot = phases_.slots_[next_++];
    for (int i; (i = slot.claimed.fetch_add(1, std::memory_order_relaxed)) < count;) {
      do_item(i);
      if (slot.done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) slot.done.notify_all();
    }
    int done;
    for (int spins = 0; (done = slot.done.load(std::memory_order_acquire)) < count; ++spins) {
      if (spins < kSpins)
        _mm_pause();
      else
        slot.done.wait(done, std::memory_order_acquire);  // sleep: the one waited for may need this core
    }
  }

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
  // About 50 us: longer than any phase of a small step is out of balance.
  static constexpr int kSpins = 2000;
  Phases& phases_;
  const int threads_;
  int next_ = 0;
};

}  // namespace headwater
