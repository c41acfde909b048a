// A whole step through the decoder: embedding, layers over paged KV, and logits of some rows. One parallel
// region, so that a step is one call from Python and threads meet at barriers only.
#pragma once

#include <chrono>

#include "work.h"

namespace headwater {

// Weights of one layer. Norms are fp32 [hidden]; `qk_norm` is fp32 [heads + kv_heads, head_dim] or null.
struct Layer {
  const float* attention_norm;
  Linear qkv;
  const float* qk_norm;
  Linear out;
  const float* mlp_norm;
  Linear gate, up, down;
};

// `embedding` is [vocab, hidden] in the model's dtype, `rope` fp32 [context, head_dim]: cosines, then sines.
struct Model {
  int32_t layers, hidden, wide, heads, kv_heads, head_dim;
  float eps;
  const void* embedding;
  const float* rope;
  const Layer* layer;
  const float* final_norm;
  Linear head;
};

enum Phase { kNorm, kLinear, kRotate, kAttend, kPhases };

// Buffers of a step, kept for the next one.
struct Step {
  KvPool pool = {};
  int threads = 1;
  Work work;
  const int64_t* slots = nullptr;
  std::vector<Scratch> scratch;
  std::vector<uint8_t> x, q, attended, wide;
  std::vector<float> qkv;
  double seconds[kPhases] = {};
  std::unique_ptr<Phases> phases;

  // Room for a region of `count` phases, cleared.
  Phases& start(int count) {
    if (!phases || phases->most() < count) phases.reset(new Phases(count, threads));
    phases->clear();
    return *phases;
  }
};

// Adds the time since the last call to a phase; of one thread.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(omp_get_thread_num() ? nullptr : seconds), last_(now()) {}
  void mark(Phase phase) {
    if (!seconds_) return;
    const double at = now();
    seconds_[phase] += at - last_;
    last_ = at;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  double* seconds_;
  double last_;
};

// RoPE of one head in place: halves (a, b) become (a cos - b sin, b cos + a sin).
inline void rotate(float* x, const float* angles, int head_dim) {
  const int half = head_dim / 2;
  int d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const Vec a = load(x + d), b = load(x + half + d), cos = load(angles + d), sin = load(angles + half + d);
    store(x + d, sub(mul(a, cos), mul(b, sin)));
    store(x + half + d, add(mul(b, cos), mul(a, sin)));
  }
  for (; d < half; ++d) {  // heads of fewer than two vectors
    const float a = x[d], b = x[half + d], cos = angles[d], sin = angles[half + d];
    x[d] = a * cos - b * sin;
    x[half + d] = b * cos + a * sin;
  }
}

// Norm (where the model has it) and RoPE of one row; queries to q [kv_heads, rows, group, head_dim], keys and
// values to their page.
template <class T>
inline void place_row(const Model& model, const Layer& layer, const Step& step, const Pages<T>& kv, int row,
                      float* qkv, T* q) {
  const int dim = model.head_dim, group = model.heads / model.kv_heads, rows = step.work.rows;
  const float* angles = model.rope + static_cast<int64_t>(step.work.positions[row]) * dim;
  T key[256], value[256];
  for (int h = 0; h < model.heads + model.kv_heads; ++h) {
    float* x = qkv + h * dim;
    if (layer.qk_norm) rms_norm<float>(x, layer.qk_norm + h * dim, model.eps, dim, x);
    rotate(x, angles, dim);
    T* to = h < model.heads ? q + ((static_cast<int64_t>(h / group) * rows + row) * group + h % group) * dim : key;
    for (int d = 0; d < dim; d += kLanes) Element<T>::narrow(to + d, load(x + d));
    if (h < model.heads) continue;
    const float* v = qkv + (h + model.kv_heads) * dim;
    for (int d = 0; d < dim; d += kLanes) Element<T>::narrow(value + d, load(v + d));
    kv.write(step.slots[row], h - model.heads, key, value);
  }
}

// Run the layers over hidden fp32 [rows, hidden].
template <class T>
inline void run_layers(Member& team, const Model& model, Step& step, float* hidden, Clock& clock) {
  const int rows = step.work.rows, size = model.hidden;
  const int64_t fused = static_cast<int64_t>(model.heads + 2 * model.kv_heads) * model.head_dim;
  T* x = reinterpret_cast<T*>(step.x.data());
  T* q = reinterpret_cast<T*>(step.q.data());
  T* attended = reinterpret_cast<T*>(step.attended.data());
  T* wide = reinterpret_cast<T*>(step.wide.data());
  Scratch& scratch = step.scratch[omp_get_thread_num()];
  const auto norm = [&](const float* weight) {
    team.each_range(rows, [&](int64_t row, int end) {
      for (; row < end; ++row) rms_norm(hidden + row * size, weight, model.eps, size, x + row * size);
    });
    clock.mark(kNorm);
  };
  for (int index = 0; index < model.layers; ++index) {
    const Layer& layer = model.layer[index];
    const Pages<T> kv(step.pool, index);
    norm(layer.attention_norm);
    multiply<T, false>(team, layer.qkv, x, rows, step.qkv.data(), fused, first_panel<T>(team, layer.out, rows));
    clock.mark(kLinear);
    team.each_range(rows, [&](int row, int end) {
      for (; row < end; ++row) place_row(model, layer, step, kv, row, &step.qkv[row * fused], q);
    });
    clock.mark(kRotate);
    attend_all(team, step.pool, index, step.work, q, scratch, attended);
    clock.mark(kAttend);
    multiply<T, true>(team, layer.out, attended, rows, hidden, size, first_panel<T>(team, layer.gate, rows));
    clock.mark(kLinear);
    norm(layer.mlp_norm);
    multiply_gated(team, layer.gate, layer.up, x, rows, wide, first_panel<T>(team, layer.down, rows));
    const Span then = index + 1 < model.layers ? first_panel<T>(team, model.layer[index + 1].qkv, rows) : Span();
    multiply<T, true>(team, layer.down, wide, rows, hidden, size, then);
    clock.mark(kLinear);
  }
}

}  // namespace headwater
