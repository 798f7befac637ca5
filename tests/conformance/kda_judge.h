// The judge of Kimi Delta Attention: the recurrence in double, written apart from what it judges.
#pragma once

#include <cmath>
#include <vector>

#include "kda_world.h"

namespace perigee {

// The recurrence in double, one sequence, all heads, token by token from the start.
class KdaJudge {
 public:
  explicit KdaJudge(const KdaWeights& w) : w_(w), heads_(static_cast<size_t>(w.shape.heads)) {
    for (Head& head : heads_) {
      head.s.resize(128 * 128);
      head.tail.resize(3 * 3 * 128);
    }
  }
  // Row r of `rows` -> output [h * 128].
  std::vector<double> run(const KdaRows& rows, int64_t r) {
    std::vector<double> out;
    for (int64_t h = 0; h < w_.shape.heads; ++h) run_head(rows, r, h, out);
    return out;
  }
  // As KdaMemory::units().
  std::vector<double> units() const {
    std::vector<double> out;
    for (const Head& head : heads_) {
      out.insert(out.end(), head.s.begin(), head.s.end());
      out.insert(out.end(), head.tail.begin(), head.tail.end());
    }
    return out;
  }

 private:
  struct Head {
    std::vector<double> s, tail;
  };

  std::vector<double> convolve(Head& head, const float* x, int64_t part, int64_t h) const {
    const int64_t width = w_.shape.width();
    double* tail = head.tail.data() + part * 3 * 128;
    std::vector<double> out(128);
    for (int64_t i = 0; i < 128; ++i) {
      const double window[4] = {tail[i], tail[128 + i], tail[256 + i], x[i]};
      double sum = 0;
      for (int64_t j = 0; j < 4; ++j) {
        sum += w_.conv[static_cast<size_t>(j * 3 * width + part * width + h * 128 + i)] * window[j];
      }
      out[static_cast<size_t>(i)] = sum / (1 + std::exp(-sum));
      for (int64_t j = 0; j < 3; ++j) tail[j * 128 + i] = window[j + 1];
    }
    return out;
  }
  static void normalise(std::vector<double>& x, double gain) {
    double sum = 1e-6;
    for (const double v : x) sum += v * v;
    for (double& v : x) v *= gain / std::sqrt(sum);
  }

  void run_head(const KdaRows& rows, int64_t r, int64_t h, std::vector<double>& out) {
    const int64_t width = w_.shape.width();
    Head& head = heads_[static_cast<size_t>(h)];
    std::vector<double> x[3];
    for (int64_t part = 0; part < 3; ++part) {
      x[part] = convolve(head, rows.qkv.data() + (r * 3 + part) * width + h * 128, part, h);
    }
    normalise(x[0], 1 / std::sqrt(128.0));
    normalise(x[1], 1);
    const double beta = 1 / (1 + std::exp(-static_cast<double>(rows.b[static_cast<size_t>(r * w_.shape.heads + h)])));
    double held[128] = {}, o[128] = {};
    for (size_t i = 0; i < 128; ++i) {
      const size_t channel = static_cast<size_t>(h) * 128 + i;
      const double a = static_cast<double>(rows.a[static_cast<size_t>(r * width) + channel]) + w_.dt_bias[channel];
      const double decay = std::exp(-w_.a[static_cast<size_t>(h)] * (a > 20 ? a : std::log1p(std::exp(a))));
      for (size_t j = 0; j < 128; ++j) held[j] += x[1][i] * (head.s[i * 128 + j] *= decay);
    }
    double mean_square = 0;
    for (size_t i = 0; i < 128; ++i) {
      for (size_t j = 0; j < 128; ++j) {
        head.s[i * 128 + j] += x[1][i] * beta * (x[2][j] - held[j]);
        o[j] += x[0][i] * head.s[i * 128 + j];
      }
    }
    for (const double v : o) mean_square += v * v / 128;
    for (size_t i = 0; i < 128; ++i) {
      const double z = rows.z[static_cast<size_t>(r * width + h * 128) + i];
      out.push_back(o[i] / std::sqrt(mean_square + w_.eps) * w_.o_norm[i] / (1 + std::exp(-z)));
    }
  }

  const KdaWeights& w_;
  std::vector<Head> heads_;
};

}  // namespace perigee
