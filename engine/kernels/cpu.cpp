// The C interface of the CPU kernel, as engine/kernels/library.py declares it. Its callers have checked sizes and
// indices: nothing here checks again. What returns an int returns 0, or 1 where there was no memory for it: all
// memory is taken before a parallel region begins.
#include <new>

#include "decoder.h"

using namespace headwater;

namespace {

#if defined(__AVX512BF16__)
constexpr bool kBf16 = true;
#else
constexpr bool kBf16 = false;
using bf16 = float;  // never called with it
#endif

// call(T()) with the element type of a dtype: 2 bytes are bf16, 4 fp32.
template <class Call>
void typed(int bytes, Call call) {
  if (bytes == 4)
    call(float());
  else
    call(bf16());
}

// Phases of a layer outside its attention, and of attention beside those of its items, at most.
constexpr int kLayerPhases = 7, kAttendPhases = 2;

template <class Call>
int with_memory(Call call) {
  try {
    call();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

void fit(std::vector<uint8_t>& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
}

}  // namespace

extern "C" {

// What this build is: vector lanes, and whether it has bf16.
int headwater_lanes() { return kLanes; }
int headwater_panel() { return kPanel; }
int headwater_has_bf16() { return kBf16; }

Step* headwater_step_new(const KvPool* pool, int threads) {
  Step* step = new Step;
  step->pool = *pool, step->threads = threads;
  step->scratch.resize(threads);
  return step;
}

void headwater_step_free(Step* step) { delete step; }

// Seconds that thread 0 spent in each Phase since the last call; reading clears them.
void headwater_step_seconds(Step* step, double* out) {
  for (int i = 0; i < kPhases; ++i) out[i] = step->seconds[i], step->seconds[i] = 0.0;
}

// Prepare a step: levels of a plan, the private one last. The arrays must live until the step is over.
int headwater_step_begin(Step* step, int bytes, int64_t rows, const int32_t* positions, const int64_t* slots,
                          const Segments* levels, int count) {
  return with_memory([&] {
    step->work.rows = static_cast<int>(rows);
    step->work.positions = positions;
    step->slots = slots;
    Cutter(step->pool, step->threads, levels, count, step->work);
    for (Scratch& scratch : step->scratch) scratch.fit(step->pool, bytes);
    fit(step->q, rows * step->pool.heads * step->pool.head_dim * bytes);
  });
}

// KV rows in and out of pages: rows is [n, 2, kv_heads, head_dim].
void headwater_write_rows(const KvPool* pool, int bytes, int layer, int64_t n, const int64_t* slots, const void* rows) {
  typed(bytes, [&](auto kind) {
    using T = decltype(kind);
    const Pages<T> kv(*pool, layer);
    const int64_t half = static_cast<int64_t>(pool->kv_heads) * pool->head_dim;
    const T* from = static_cast<const T*>(rows);
    for (int64_t i = 0; i < n; ++i, from += 2 * half)
      for (int h = 0; h < pool->kv_heads; ++h)
        kv.write(slots[i], h, from + h * pool->head_dim, from + half + h * pool->head_dim);
  });
}

void headwater_read_rows(const KvPool* pool, int bytes, int layer, int64_t n, const int64_t* slots, void* rows) {
  typed(bytes, [&](auto kind) {
    using T = decltype(kind);
    const Pages<T> kv(*pool, layer);
    T* to = static_cast<T*>(rows);
    for (int64_t i = 0; i < n; ++i)
      for (int part = 0; part < 2; ++part)
        for (int h = 0; h < pool->kv_heads; ++h) {
          const int64_t page = slots[i] / pool->page_size;
          const int offset = static_cast<int>(slots[i] % pool->page_size);
          for (int d = 0; d < pool->head_dim; ++d)
            *to++ = part ? kv.values(page, h)[kv.value_at(offset, d)] : kv.keys(page, h)[kv.key_at(offset, d)];
        }
  });
}

// Copy the first rows[i] tokens of page source[i] to page target[i], one after the other, in every layer.
void headwater_copy_rows(const KvPool* pool, int bytes, int layers, int64_t n, const int32_t* source,
                         const int32_t* target, const int32_t* rows) {
  typed(bytes, [&](auto kind) {
    using T = decltype(kind);
    for (int layer = 0; layer < layers; ++layer) {
      const Pages<T> kv(*pool, layer);
      for (int64_t i = 0; i < n; ++i)
        for (int h = 0; h < pool->kv_heads; ++h)
          for (int offset = 0; offset < rows[i]; ++offset)
            for (int d = 0; d < pool->head_dim; ++d) {
              const int64_t key = kv.key_at(offset, d), value = kv.value_at(offset, d);
              kv.keys(target[i], h)[key] = kv.keys(source[i], h)[key];
              kv.values(target[i], h)[value] = kv.values(source[i], h)[value];
            }
    }
  });
}

// Write the rows' KV, then attend, in one layer. Rows of q [heads, head_dim], k and v [kv_heads, head_dim] are
// dense and stand q_stride, k_stride and v_stride elements apart. out is [rows, heads, head_dim].
int headwater_attend(Step* step, int bytes, int layer, const void* q, int64_t q_stride, const void* k,
                      int64_t k_stride, const void* v, int64_t v_stride, void* out) {
  return with_memory([&] {
    typed(bytes, [&](auto kind) {
      using T = decltype(kind);
      const KvPool& pool = step->pool;
      const Pages<T> kv(pool, layer);
      const int rows = step->work.rows, dim = pool.head_dim, group = pool.heads / pool.kv_heads;
      T* packed = reinterpret_cast<T*>(step->q.data());
      Phases& phases = step->start(kAttendPhases + static_cast<int>(step->work.phases.size()));
#pragma omp parallel num_threads(step->threads)
      {
        Member team(phases);
        Clock clock(step->seconds);
        team.each_range(rows, [&](int row, int end) {
          for (; row < end; ++row)
            for (int h = 0; h < pool.kv_heads; ++h) {
              std::memcpy(packed + (static_cast<int64_t>(h) * rows + row) * group * dim,
                          static_cast<const T*>(q) + row * q_stride + h * group * dim, group * dim * sizeof(T));
              kv.write(step->slots[row], h, static_cast<const T*>(k) + row * k_stride + h * dim,
                       static_cast<const T*>(v) + row * v_stride + h * dim);
            }
        });
        clock.mark(kRotate);
        attend_all(team, pool, layer, step->work, packed, step->scratch[omp_get_thread_num()], static_cast<T*>(out));
        clock.mark(kAttend);
      }
    });
  });
}

// A whole step up to the final norm: hidden fp32 [rows, hidden].
int headwater_forward(const Model* model, Step* step, int bytes, const int64_t* tokens, float* hidden) {
  return with_memory([&] {
    const int64_t rows = step->work.rows, fused = static_cast<int64_t>(model->heads + 2 * model->kv_heads) * model->head_dim;
    fit(step->attended, rows * model->heads * model->head_dim * bytes);
    fit(step->x, rows * model->hidden * bytes);
    fit(step->wide, rows * model->wide * bytes);
    if (static_cast<int64_t>(step->qkv.size()) < rows * fused) step->qkv.resize(rows * fused);
    typed(bytes, [&](auto kind) {
      using T = decltype(kind);
      const T* embedding = static_cast<const T*>(model->embedding);
      const int size = model->hidden;
      Phases& phases =
          step->start(1 + model->layers * (kLayerPhases + kAttendPhases + static_cast<int>(step->work.phases.size())));
#pragma omp parallel num_threads(step->threads)
      {
        Member team(phases);
        Clock clock(step->seconds);
        team.each_range(static_cast<int>(rows), [&](int64_t row, int end) {
          for (; row < end; ++row)
            for (int i = 0; i < size; i += kLanes)
              store(hidden + row * size + i, Element<T>::widen(embedding + tokens[row] * size + i));
        });
        run_layers<T>(team, *model, *step, hidden, clock);
      }
    });
  });
}

// Logits of n rows of hidden fp32 [n, hidden]: out fp32 [n, ldo], ldo being the vocabulary padded to panels.
int headwater_logits(const Model* model, int threads, int bytes, int64_t n, const float* hidden, void* x, float* out,
                      int64_t ldo) {
  return with_memory([&] {
    typed(bytes, [&](auto kind) {
      using T = decltype(kind);
      T* normed = static_cast<T*>(x);
      const int size = model->hidden;
      Phases phases(2, threads);
#pragma omp parallel num_threads(threads)
      {
        Member team(phases);
        team.each_range(static_cast<int>(n), [&](int64_t row, int end) {
          for (; row < end; ++row)
            rms_norm(hidden + row * size, model->final_norm, model->eps, size, normed + row * size);
        });
        multiply<T, false>(team, model->head, normed, static_cast<int>(n), out, ldo);
      }
    });
  });
}

// One linear alone: out fp32 [rows, ldo].
int headwater_linear(const Linear* linear, int threads, int bytes, int64_t rows, const void* x, float* out, int64_t ldo) {
  return with_memory([&] {
    typed(bytes, [&](auto kind) {
      using T = decltype(kind);
      Phases phases(1, threads);
#pragma omp parallel num_threads(threads)
      {
        Member team(phases);
        multiply<T, false>(team, *linear, static_cast<const T*>(x), static_cast<int>(rows), out, ldo);
      }
    });
  });
}

}  // extern "C"
