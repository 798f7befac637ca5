// Kimi Delta Attention token by token, as it is defined (Kimi Linear 2025, section 3), with deferred commit (batch.h).
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/ref/ref_ops.h"

namespace perigee {
namespace {

float sigmoid(float z) {
  return 1.0f / (1.0f + std::exp(-z));
}

float softplus(float z) {
  return z > 20 ? z : std::log1p(std::exp(z));
}

// What one head is given of one token: the convolution's inputs [q, k, v][dim], log decay [dim], beta.
struct HeadToken {
  std::vector<float> x, g;
  float beta = 0;
};

// One head of one sequence while its tokens run.
class HeadRun {
 public:
  HeadRun(const KdaWeights& w, int64_t head) : w_(w), dim_(w.shape.dim), head_(head), o_(w.shape.dim) {
    for (std::vector<float>& part : qkv_) part.resize(static_cast<size_t>(dim_));
  }

  void load(const uint8_t* unit) {
    const auto* from = reinterpret_cast<const float*>(unit);
    s_.assign(from, from + dim_ * dim_);
    tail_.assign(from + dim_ * dim_, from + dim_ * dim_ + w_.shape.tail_floats());
  }
  void store(uint8_t* unit) const {
    auto* to = reinterpret_cast<float*>(unit);
    std::copy(tail_.begin(), tail_.end(), std::copy(s_.begin(), s_.end(), to));
  }

  // Moves the state past one token; -> the head's output before its norm, [dim].
  const std::vector<float>& run(const HeadToken& token) {
    for (int64_t part = 0; part < 3; ++part) convolve(part, token.x.data() + part * dim_);
    normalise(qkv_[0], 1 / std::sqrt(static_cast<float>(dim_)));
    normalise(qkv_[1], 1);
    const auto& [q, k, v] = qkv_;
    std::fill(o_.begin(), o_.end(), 0.0f);
    std::vector<float> read(static_cast<size_t>(dim_));  // what the decayed state holds at k
    for (int64_t i = 0; i < dim_; ++i) {
      const float decay = std::exp(token.g[i]);
      for (int64_t j = 0; j < dim_; ++j) {
        s(i, j) *= decay;
        read[j] += k[i] * s(i, j);
      }
    }
    for (int64_t i = 0; i < dim_; ++i)
      for (int64_t j = 0; j < dim_; ++j) {
        s(i, j) += k[i] * token.beta * (v[j] - read[j]);
        o_[j] += q[i] * s(i, j);
      }
    return o_;
  }

 private:
  float& s(int64_t key, int64_t value) { return s_[key * dim_ + value]; }

  // qkv_[part] = SiLU of the causal convolution over the tail and x, which joins the tail.
  void convolve(int64_t part, const float* x) {
    const int64_t taps = w_.shape.conv, width = w_.shape.width();
    float* tail = tail_.data() + part * (taps - 1) * dim_;
    for (int64_t i = 0; i < dim_; ++i) {
      const float* weight = w_.conv.data() + part * width + head_ * dim_ + i;
      float sum = weight[(taps - 1) * 3 * width] * x[i];
      for (int64_t t = 0; t + 1 < taps; ++t) sum += weight[t * 3 * width] * tail[t * dim_ + i];
      qkv_[part][i] = sum * sigmoid(sum);
    }
    std::copy(tail + dim_, tail + (taps - 1) * dim_, tail);
    std::copy(x, x + dim_, tail + (taps - 2) * dim_);
  }

  static void normalise(std::vector<float>& x, float gain) {
    const float length = std::sqrt(ref_dot(x.data(), x.data(), static_cast<int64_t>(x.size())) + 1e-6f);
    for (float& value : x) value *= gain / length;
  }

  const KdaWeights& w_;
  const int64_t dim_, head_;
  std::vector<float> s_, tail_, o_;
  std::vector<float> qkv_[3];
};

// New token of batch row r.
HeadToken token_of_row(const KdaInputs& in, const KdaWeights& w, int64_t r, int64_t head) {
  const int64_t dim = w.shape.dim, width = w.shape.width();
  HeadToken token;
  for (int64_t part = 0; part < 3; ++part) {
    const float* x = in.qkv.row<float>(r) + part * width + head * dim;
    token.x.insert(token.x.end(), x, x + dim);
  }
  for (int64_t i = head * dim; i < (head + 1) * dim; ++i)
    token.g.push_back(-w.a[head] * softplus(in.a.row<float>(r)[i] + w.dt_bias[i]));
  token.beta = sigmoid(in.b.row<float>(r)[head]);
  return token;
}

HeadToken read_ring(const float* ring, int64_t dim) {
  return {.x = {ring, ring + 3 * dim}, .g = {ring + 3 * dim, ring + 4 * dim}, .beta = ring[4 * dim]};
}

void write_ring(const HeadToken& token, float* ring) {
  float* end = std::copy(token.g.begin(), token.g.end(), std::copy(token.x.begin(), token.x.end(), ring));
  *end = token.beta;
}

// y = RMSNorm(o) * weight * sigmoid(z)
void gated_norm(const std::vector<float>& o, const KdaWeights& w, const float* z, float* y) {
  const int64_t dim = w.shape.dim;
  const float mean_square = ref_dot(o.data(), o.data(), dim) / static_cast<float>(dim);
  const float factor = 1.0f / std::sqrt(mean_square + w.eps);
  for (int64_t i = 0; i < dim; ++i) y[i] = o[i] * factor * w.o_norm[i] * sigmoid(z[i]);
}

}  // namespace

Tensor RefOps::kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  const int64_t dim = w.shape.dim;
  const Tensor y = arena_.tensor(DType::kF32, in.qkv.rows, w.shape.width());
  for (const SequenceRows& s : batch.sequences)
    for (int64_t head = 0; head < w.shape.heads; ++head) {
      HeadRun run(w, head);
      run.load(state.unit(s.state_pages, head));
      const int32_t end = s.position + s.num_tokens, commit = s.commit_all ? end : s.position;
      for (int32_t t = s.committed; t <= end; ++t) {  // the state has seen t tokens
        if (t == commit) run.store(state.unit(s.state_pages, head));
        for (const StateCheckpoint& checkpoint : s.checkpoints)
          if (t == checkpoint.position && t > s.committed && t <= commit) run.store(state.unit(checkpoint.pages, head));
        if (t == end) break;
        auto* ring = reinterpret_cast<float*>(state.ring_token(s.slot, head, t));
        if (t < s.position) {
          run.run(read_ring(ring, dim));
          continue;
        }
        const int64_t row = s.first_row + t - s.position;
        const HeadToken token = token_of_row(in, w, row, head);
        if (!s.commit_all) write_ring(token, ring);
        gated_norm(run.run(token), w, in.z.row<float>(row) + head * dim, y.row<float>(row) + head * dim);
      }
    }
  return y;
}

}  // namespace perigee
