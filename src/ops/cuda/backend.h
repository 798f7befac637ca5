// CudaOps: the class that make_cuda_ops() makes, for code that includes CUDA headers.
#pragma once

#include <map>

#include "ops/cuda/choose.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/gemm/cublaslt.h"
#include "ops/cuda/gemm/skinny.h"
#include "ops/cuda/packed.h"
#include "ops/observed_ops.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/upload.h"

namespace perigee {

class PeerComm;
struct KdaCall;
struct MoeParts;

class CudaOps final : public Ops {
 public:
  explicit CudaOps(const CudaOptions& options);
  cudaStream_t stream() const { return stream_.get(); }
  const Stream& owned_stream() const { return stream_; }
  // The observer hears the label of each launch.
  void observe_launches(OpObserver* observer) { observer_ = observer; }
  // Exchanges with other ranks do nothing meanwhile (PeerComm::set_silent).
  void set_silent(bool silent);

  const char* name() const override { return "cuda"; }
  DType activation_dtype() const override { return DType::kBF16; }
  DType term_dtype() const override { return comm().size() > 1 ? DType::kF16 : DType::kF32; }
  bool on_device() const override { return true; }
  Buffer make_buffer(size_t bytes) override { return device_buffer(bytes); }
  void copy(void* to, const void* from, size_t bytes) override { device_copy(to, from, bytes); }
  Status status() override;
  void begin_step() override;
  // Another batch of the same step follows: work lists of the one before are not its own.
  void begin_batch() { mla_planned_ = {}; }

  std::unique_ptr<WeightPacker> sizes() const override { return make_cuda_sizes(); }
  ShapeLimits limits() const override { return kCudaLimits; }
  bool makes_dummy_weights() const override { return true; }
  using Ops::pack_linear;
  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override;
  LinearWeight pack_gate_up(const RawMatrix& gate, const RawMatrix& up) override;
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override;
  MlaUpWeight pack_mla_up(const RawMatrix& kv_b, const MlaShape& shape) override;
  EmbedWeight pack_embed(const RawMatrix& table) override;
  VectorWeight pack_vector(VectorWeight host) override;

  Tensor embed(const EmbedWeight& table, std::span<const int32_t> tokens) override;
  using Ops::rms_norm;
  void rms_norm(const Tensor& x, std::span<const float> weight, float eps, const Tensor& out) override;
  Tensor linear(const Tensor& x, const LinearWeight& w, DType out) override;
  void add(const Tensor& residual, const Tensor& y) override;
  Tensor silu_mul(const Tensor& gate_up) override;
  void rope(const Tensor& x, int64_t head_dim, int64_t rope_begin, std::span<const int32_t> positions,
            const Rope& rope) override;
  void write_latent(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache) override;
  Tensor mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache) override;
  Tensor mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                    const LatentLayer& cache) override;
  Tensor mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) override;
  Tensor attend_latents(const Tensor& queries, const MlaShape& shape, const Batch& batch,
                        const LatentLayer& cache) override;
  Tensor mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch) override;
  Tensor full_in(const Tensor& x, const FullWeights& w, const Batch& batch, const FullLayer& cache) override;
  void write_full(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) override;
  Tensor full_attend(const Tensor& q, const FullShape& shape, const Batch& batch, const FullLayer& cache) override;
  Tensor kda(const Tensor& x, const KdaWeights& w, const Batch& batch, const StateLayer& state) override;
  Tensor kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) override;
  Routing route(const Tensor& x, const RouterWeight& router) override;
  Tensor moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& experts) override;
  Tensor dense_mlp(const Tensor& x, const MlpWeights& w, DType out) override;
  Tensor moe(const Tensor& x, const MoeWeights& w) override;
  void moe_norm(const Tensor& residual, const Tensor& x, const MoeWeights& w, std::span<const float> weight, float eps,
                const Tensor& out) override;
  Tensor gather_rows(const Tensor& x, std::span<const int32_t> rows) override;
  void tap(const Tensor& x, const Tensor& out) override;
  using Ops::add_norm;
  void add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, float eps,
                const Tensor& out) override;
  void gather_residual(const Tensor& residual) override;

 private:
  // Keeps the first failure; a step's launches after it are void.
  void check(cudaError_t error, const char* op) {
    cuda_ok(error, op);
    if (observer_ != nullptr) observer_->launched(op);
  }
  void terms_by_library(GemmCall call, const char* op);
  CudaMatrix make_matrix(const MatrixLayout& layout);
  void pack(const RawMatrix& raw, PackTarget target);
  PackTarget target(CudaMatrix& matrix, int64_t index, int interleave, int64_t first_row) const;
  // y = x W^T by whichever kernel serves this many rows: of a dense bf16 or FP8 matrix; of bf16 weights as the call has
  // them; by our own kernels.
  void gemm(const CudaMatrix& w, GemmCall call, const char* op);
  void gemm(const GemmCall& call, const char* op);
  void own_gemm(WeightFormat format, const GemmCall& call, const GemmChoice& choice, const char* op);
  Tensor product(const Tensor& x, const LinearWeight& w, DType out, const char* op);  // linear() under that label
  // 512 latent and 64 rope columns: what mla_decode.h and mla_write.h serve; others run in latent_attention.h.
  bool has_mla_kernels(const MlaShape& shape, const LatentLayer& cache) const;
  // A sequence of the batch, which is on the device at this index.
  struct CachedSequence {
    const SequenceRows& rows;
    const DeviceSequences& all;
    size_t index;
  };
  // Queries in latent space of the batch's rows from `first` on.
  struct QueryRows {
    const Tensor& rows;
    int64_t first;
  };
  void absorb(const Tensor& q, const CudaMlaUp& weights, const MlaShape& shape, const Tensor& query);
  void project(const Tensor& mixed, const CudaMlaUp& weights, const MlaShape& shape, const Tensor& y);
  // q: the rows of all sequences of the batch.
  void attend_absorbed(const Tensor& q, const CudaMlaUp& weights, const MlaShape& shape, const Batch& batch,
                       const LatentLayer& cache, const Tensor& y);
  void attend_shared(const Tensor& q, const CudaMlaUp& weights, const MlaShape& shape, const Batch& batch,
                     const LatentLayer& cache, const Tensor& y);
  void attend_expanded(const CachedSequence& sequence, const Tensor& q, const CudaMlaUp& weights, const MlaShape& shape,
                       const LatentLayer& cache, const Tensor& y);
  void gather_latents(const CachedSequence& sequence, int64_t begin, const LatentLayer& cache, int64_t latent,
                      const Tensor& latents);
  Tensor shown(const Buffer& memory, DType dtype, int64_t rows, int64_t cols);
  void gather_queries(const Tensor& mine, const Tensor& all);
  void merge_ranks(const Tensor& results, const MlaShape& shape, const Tensor& mixed);
  std::span<const int32_t> row_owners(int64_t rows, int64_t heads);
  // out: the mean, bf16 [rows, heads * L], or results, f16 [rows * heads, result_columns(L)].
  void attend(const QueryRows& query, const MlaShape& shape, const Batch& batch, const LatentLayer& cache,
              const Tensor& out);
  void attend_lists(const QueryRows& query, const MlaShape& shape, const Batch& batch, const LatentLayer& cache,
                    const Tensor& out);
  void attend_rows(const QueryRows& query, const MlaShape& shape, const Batch& batch, const LatentLayer& cache,
                   const Tensor& out);
  struct ExpertLists {
    GemmCall call;  // its lists alone
    ExpertChoice choice;
  };
  ExpertLists make_lists(const Routing& routing, const ExpertWeights& weights);
  // The outputs of each token's experts, [n * k, H], not yet summed.
  Tensor run_experts(const Tensor& x, const Routing& routing, const ExpertLists& lists, const ExpertWeights& weights);
  MoeParts run_moe(const Tensor& x, const MoeWeights& w);
  void run_prefills(const KdaCall& call, const Batch& batch);
  void expert_product(const CudaMatrix& weight, GemmCall call, const ExpertLists& lists, const char* op);

  const CudaOptions options_;
  // comm() and dcp(), where the ranks reach each other's memory.
  PeerComm* peers_ = nullptr;
  PeerComm* dcp_peers_ = nullptr;
  OpObserver* observer_ = nullptr;
  Stream stream_;
  std::unique_ptr<Upload> upload_;  // from the first weight that is read to the first step
  std::unique_ptr<CublasLt> cublas_;
  int multiprocessors_ = 0;
  KernelTraits traits_;
  // Work lists of attention: made in a step's first layer, read by all, unless there are several of one layer. Outgrown
  // memory stays for the graphs that hold its address.
  std::vector<Buffer> mla_workspaces_;
  std::pair<int64_t, int64_t> mla_planned_;  // the rows that the lists are of
  Buffer shown_queries_, shown_results_;     // see shown()
  std::map<int64_t, Buffer> row_owners_;     // by heads: see row_owners()
  Buffer full_partials_;                     // from the first full_attend() on, which is not in a graph
};

}  // namespace perigee
