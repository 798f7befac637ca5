// Ranks that share the blocks of each sequence (decode context parallelism) attend like one rank that has them all.
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>

#include "backends.h"
#include "comm/thread_comms.h"
#include "ops/cuda/mla/result_row.h"
#include "ops/place_batch.h"

namespace perigee {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Which rank of so many has a block.
using Deal = std::function<int32_t(int64_t block, int32_t ranks)>;
int32_t by_turns(int64_t block, int32_t ranks) {
  return static_cast<int32_t>(block % ranks);
}
int32_t last_rank(int64_t, int32_t ranks) {
  return ranks - 1;
}
int32_t at_random(int64_t block, int32_t ranks) {
  return static_cast<int32_t>(random_u64(7, static_cast<uint64_t>(block)) % static_cast<uint64_t>(ranks));
}
// All but the newest.
int32_t others_than_first(int64_t block, int32_t ranks) {
  return static_cast<int32_t>(1 + block % (ranks - 1));
}

// The step's new tokens are the newest of the sequence's.
struct Sequence {
  int64_t tokens = 1, fresh = 1;
  MlaForm form = MlaForm::kAbsorbed;
};

constexpr MlaShape kSmall{.heads = 12, .nope = 16, .rope = 8, .value = 20, .latent = 32, .softmax_scale = 0.3f};
// The geometry of the family, and another one: kernels of a GPU.
constexpr MlaShape kUsual{.heads = 12, .nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 0.1447f};
constexpr MlaShape kOther{.heads = 12, .nope = 64, .rope = 32, .value = 64, .latent = 256, .softmax_scale = 0.1f};

struct World {
  MlaShape shape = kSmall;
  std::vector<Sequence> sequences;
  Deal deal = by_turns;
  std::optional<LatentFormat> cache = {};  // none: numbers as the backend computes with them
  bool holes = false;                      // no rank has any block
  // Latents of positions [first, first + count) begin with two of `bad`, in bf16: NaN.
  int64_t first_nan = 0, num_nan = 0;
  uint16_t bad = 0x7FC0;

  int32_t num_rows() const {
    int64_t rows = 0;
    for (const Sequence& s : sequences) rows += s.fresh;
    return static_cast<int32_t>(rows);
  }
};

using MakeOps = std::function<std::unique_ptr<Ops>(Comm& dcp)>;

struct Implementation {
  std::string name;
  MakeOps make;
  MlaShape shape = kSmall;
  double bound = kBound;  // of the distance between a group's and one rank's
  bool on_gpu = false;
};

Implementation cpu(Isa isa, int num_threads) {
  return {.name = isa_name(isa), .make = [=](Comm& dcp) {
            auto ops = make_cpu_ops({.num_threads = num_threads, .isa = isa, .dcp = dcp});
            CHECK(ops.ok(), ops.error().message);
            return std::move(*ops);
          }};
}

// Both sides round weights, means and outputs to bf16, after sums of their own.
Implementation cuda(std::string name, CudaOptions kernels, const MlaShape& shape) {
  kernels.separate_arrays = gpu_sanitizer();
  kernels.no_library = gpu_sanitizer_of_own_kernels();
  return {.name = std::move(name),
          .make =
              [=](Comm& dcp) {
                CudaOptions options = kernels;
                options.dcp = &dcp;
                auto ops = make_cuda_ops(options);
                CHECK(ops.ok(), ops.error().message);
                return std::move(*ops);
              },
          .shape = shape,
          .bound = 1.5e-2,
          .on_gpu = true};
}

std::vector<Implementation> on_host() {
  std::vector<Implementation> all = {
      {.name = "ref", .make = [](Comm& dcp) { return make_ref_ops(Comm::alone(), dcp); }, .bound = 3e-6}};
  for (const Isa isa : isas_under_test()) all.push_back(cpu(isa, 1));
  return all;
}

std::vector<Implementation> on_gpu() {
  if (!make_cuda_ops({}).ok()) return {};
  if (gpu_sanitizer()) return {cuda("cuda", {}, kUsual), cuda("cuda_portable", {.portable = true}, kUsual)};
  return {cuda("cuda", {}, kUsual), cuda("cuda_fixed", {.deterministic = true}, kUsual),
          cuda("cuda_portable", {.portable = true}, kUsual), cuda("cuda, other geometry", {}, kOther)};
}

std::vector<Implementation> implementations() {
  std::vector<Implementation> all = gpu_sanitizer() ? std::vector<Implementation>() : on_host();
  for (Implementation& with : on_gpu()) all.push_back(std::move(with));
  return all;
}

// Held by the rank that runs, where one runs at a time.
using Turn = std::unique_lock<std::mutex>;

// A GPU's operands by way of the host, whose ranks exchange them. Others have their turn while a rank waits.
class StagedComm final : public Comm {
 public:
  StagedComm(Comm& host, Turn* turn) : Comm(host.rank(), host.size()), host_(host), turn_(turn) {}
  void use(Ops& ops) { ops_ = &ops; }  // which lie between the GPU and the host

  void all_reduce(const Tensor&) override { CHECK(false, "no sums in here"); }
  void all_gather(const void* mine, size_t bytes, void* all) override {
    if (!ops_->on_device()) return wait([&] { host_.all_gather(mine, bytes, all); });
    std::vector<uint8_t> in(bytes), out(bytes * static_cast<size_t>(size()));
    ops_->copy(in.data(), mine, bytes);
    wait([&] { host_.all_gather(in.data(), bytes, out.data()); });
    ops_->copy(all, out.data(), out.size());
  }
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override {
    if (!ops_->on_device()) return wait([&] { host_.all_to_all(part, to, whole); });
    Values in = perigee::fetch(*ops_, part);
    Values out{
        .rows = whole.rows, .cols = whole.cols, .at = std::vector<float>(static_cast<size_t>(whole.rows * whole.cols))};
    Tensor from = part, all = whole;
    from.data = in.at.data(), all.data = out.at.data();
    const std::vector<int32_t> owners = perigee::fetch(*ops_, to.data(), std::ssize(to));
    wait([&] { host_.all_to_all(from, owners, all); });
    ops_->copy(whole.data, out.at.data(), out.at.size() * sizeof(float));
  }
  void barrier() override {
    wait([&] { host_.barrier(); });
  }
  Status status() const override { return host_.status(); }

 private:
  template <typename F>
  void wait(const F& exchange) {
    if (turn_ != nullptr) turn_->unlock();
    exchange();
    if (turn_ != nullptr) turn_->lock();
  }

  Comm& host_;
  Turn* const turn_;
  Ops* ops_ = nullptr;
};

// The blocks of one sequence that lie with a rank.
struct Table {
  std::vector<uint8_t> owners;
  std::vector<int32_t> here, pages;
};

// One rank of the group: its cache, which holds NaN wherever it does not write, and its heads.
class RankUnderTest {
 public:
  RankUnderTest(const World& world, const MakeOps& make, Comm& dcp, Turn* turn = nullptr)
      : world_(world), dcp_(dcp, turn), ops_(make(dcp_)) {
    const MlaShape& s = world.shape;
    dcp_.use(*ops_);
    shape_ = s;
    shape_.heads = s.heads / dcp.size();
    layer_.format = world.cache.value_or(latent_format(ops_->activation_dtype()));
    if (layer_.format == LatentFormat::kF8E4M3) layer_.scale = 0.37f;
    layer_.row_bytes = latent_row_bytes(layer_.format, s.latent, s.rope);
    layer_.page_bytes = 64 * layer_.row_bytes + 128;
    int64_t num_pages = 1;
    for (const Sequence& sequence : world.sequences) num_pages += (sequence.tokens + 63) / 64;
    const std::vector<uint8_t> nans(static_cast<size_t>(num_pages * layer_.page_bytes),
                                    layer_.format == LatentFormat::kF8E4M3 ? 0x7F : 0xFF);
    memory_ = ops_->make_buffer(nans.size());
    ops_->copy(memory_.data(), nans.data(), nans.size());
    layer_.base = memory_.data();
    for (const Sequence& sequence : world.sequences) {
      Table& table = tables_.emplace_back();
      for (int32_t b = 0; b < (sequence.tokens + 63) / 64; ++b) {
        const int32_t owner = world.deal(b, dcp.size());
        table.owners.push_back(static_cast<uint8_t>(owner));
        --num_pages;
        if (owner != dcp.rank() || world.holes) continue;
        table.here.push_back(b);
        table.pages.push_back(static_cast<int32_t>(num_pages));
      }
    }
    write();
  }

  // [rows, this rank's heads * dv].
  Values attend() {
    poison(*ops_, 8 << 20);
    const HostBatch host(*this);
    const PlacedBatch placed(host.batch, *ops_);
    const int64_t up_rows = world_.shape.nope + world_.shape.value, latent = world_.shape.latent;
    Stored up = store(WeightFormat::kBF16, world_.shape.heads * up_rows, latent, 41);
    up.raw.out = shape_.heads * up_rows;
    up.raw.data = up.data.data() + dcp_.rank() * up.raw.out * latent * 2;
    return fetch(*ops_, ops_->mla_attend(queries(std::ssize(host.positions)), ops_->pack_mla_up(up.raw, shape_), shape_,
                                         placed.batch(), layer_));
  }

  // Of all heads over this rank's blocks: [rows * heads, L + 1].
  Values results() {
    poison(*ops_, 8 << 20);
    const HostBatch host(*this);
    const PlacedBatch placed(host.batch, *ops_);
    const int64_t width = world_.shape.heads * (world_.shape.latent + world_.shape.rope);
    const Tensor queries = activation(*ops_, std::ssize(host.positions), width, 43);
    const Tensor results = ops_->attend_latents(queries, world_.shape, placed.batch(), layer_);
    if (results.dtype == DType::kF16) return narrow_results(results);
    Values out{.rows = results.rows, .cols = results.cols, .at = {}};
    for (int64_t row = 0; row < out.rows; ++row) {
      Tensor alone = results.row_range(row, 1);
      alone.row_stride = alone.cols;
      const Values one = fetch(*ops_, alone);
      out.at.insert(out.at.end(), one.at.begin(), one.at.end());
    }
    return out;
  }

 private:
  // A GPU's, as result_row.h: f16 of sixteenths of means, and f32 log-sums.
  Values narrow_results(const Tensor& results) {
    const int64_t latent = world_.shape.latent;
    const std::vector<uint16_t> all = perigee::fetch(*ops_, results.row<uint16_t>(0), results.rows * results.cols);
    Values out{.rows = results.rows, .cols = latent + 1, .at = {}};
    for (auto row = all.begin(); row != all.end(); row += results.cols) {
      std::transform(row, row + latent, std::back_inserter(out.at),
                     [](uint16_t x) { return kMeanUnit * f16_to_f32(x); });
      float log_sum = 0;
      std::memcpy(&log_sum, &*(row + latent), sizeof(log_sum));
      out.at.push_back(log_sum);
    }
    return out;
  }
  // This rank's heads.
  Tensor queries(int64_t rows) {
    const int64_t width = shape_.heads * shape_.q_head();
    const Tensor all = activation(*ops_, rows, width * dcp_.size(), 42, ops_->wide_dtype());
    const Tensor mine = ops_->arena().tensor(all.dtype, rows, width);
    for (int64_t row = 0; row < rows; ++row)
      ops_->copy(mine.row_range(row, 1).data, all.columns(dcp_.rank() * width, width).row_range(row, 1).data,
                 static_cast<size_t>(width * dtype_bytes(all.dtype)));
    return mine;
  }
  SequenceRows rows_of(size_t i, int64_t position, int64_t count) const {
    const Table& table = tables_[i];
    SequenceRows rows{.num_tokens = static_cast<int32_t>(count),
                      .position = static_cast<int32_t>(position),
                      .pages = table.pages.data()};
    if (dcp_.size() > 1) rows.shared = {.here = table.here, .owners = table.owners.data()};
    return rows;
  }
  struct HostBatch {
    explicit HostBatch(const RankUnderTest& of) {
      for (size_t i = 0; i < of.tables_.size(); ++i) {
        const Sequence& s = of.world_.sequences[i];
        rows.push_back(of.rows_of(i, s.tokens - s.fresh, s.fresh));
        rows.back().first_row = static_cast<int32_t>(positions.size());
        rows.back().form = s.form;
        for (int64_t t = s.tokens - s.fresh; t < s.tokens; ++t) positions.push_back(static_cast<int32_t>(t));
      }
      batch.positions = positions;
      batch.sequences = rows;
    }
    std::vector<int32_t> positions;
    std::vector<SequenceRows> rows;
    Batch batch;
  };
  // The first half last: a row that lies elsewhere must not be stored over one that lies here.
  void write() {
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t tokens = world_.sequences[i].tokens;
      ops_->begin_step();
      const Tensor c =
          activation(*ops_, tokens, world_.shape.latent, 100 + i, ops_->on_device() ? DType::kBF16 : DType::kF32);
      const uint32_t nan = world_.bad * (ops_->on_device() ? 0x00010001u : 0x00010000u);
      for (int64_t t = 0; t < world_.num_nan; ++t) ops_->copy(c.row_range(world_.first_nan + t, 1).data, &nan, 4);
      const Tensor k_rope = activation(*ops_, tokens, world_.shape.rope, 200 + i, DType::kF32);
      for (const auto& [position, count] : {std::pair{tokens / 2, tokens - tokens / 2}, {int64_t{0}, tokens / 2}}) {
        if (count == 0) continue;
        const SequenceRows rows = rows_of(i, position, count);
        std::vector<int32_t> positions(static_cast<size_t>(count));
        std::iota(positions.begin(), positions.end(), static_cast<int32_t>(position));
        Batch batch;
        batch.positions = positions;
        batch.sequences = {&rows, 1};
        const PlacedBatch placed(batch, *ops_);
        ops_->write_latent(c.row_range(position, count), k_rope.row_range(position, count), placed.batch(), layer_);
      }
    }
  }

  const World& world_;
  StagedComm dcp_;
  std::unique_ptr<Ops> ops_;
  MlaShape shape_;
  LatentLayer layer_;
  Buffer memory_;
  std::vector<Table> tables_;
};

Values attend_alone(const World& world, const MakeOps& make) {
  return RankUnderTest(world, make, Comm::alone()).attend();
}

// The heads of all ranks side by side. A checker of GPU accesses loses launches of several threads at once.
Values attend_together(const World& world, const MakeOps& make, int32_t size) {
  const std::atomic<bool> abort{false};
  ThreadComms comms(size, abort);
  std::vector<Values> parts(static_cast<size_t>(size));
  std::mutex mutex;
  const auto run = [&](int32_t r) {
    Turn turn(mutex, std::defer_lock);
    if (gpu_sanitizer()) turn.lock();
    parts[static_cast<size_t>(r)] = RankUnderTest(world, make, comms.of(r), gpu_sanitizer() ? &turn : nullptr).attend();
  };
  std::vector<std::jthread> threads;
  for (int32_t r = 0; r < size; ++r) threads.emplace_back(run, r);
  threads.clear();
  Values out{.rows = parts[0].rows, .cols = parts[0].cols * size, .at = {}};
  for (int64_t row = 0; row < out.rows; ++row)
    for (const Values& part : parts) {
      const auto from = part.at.begin() + row * part.cols;
      out.at.insert(out.at.end(), from, from + part.cols);
    }
  return out;
}

void expect_results(const Values& got, const Values& wanted, const std::string& what) {
  ASSERT_EQ(std::pair(got.rows, got.cols), std::pair(wanted.rows, wanted.cols)) << what;
  const auto means = [](const Values& of) {
    Values out{.rows = of.rows, .cols = of.cols - 1, .at = {}};
    for (auto row = of.at.begin(); row != of.at.end(); row += of.cols) out.at.insert(out.at.end(), row, row + out.cols);
    return out;
  };
  expect_close(means(got), means(wanted), what, 1.5e-2);
  for (int64_t row = 0; row < got.rows; ++row) {
    const auto last = static_cast<size_t>((row + 1) * got.cols - 1);
    const float log_sum = got.at[last], wanted_sum = wanted.at[last];
    if (wanted_sum == kNothing) {
      ASSERT_EQ(log_sum, kNothing) << what << ", row " << row;
      const auto first = got.at.begin() + row * got.cols;
      ASSERT_TRUE(std::all_of(first, first + got.cols - 1, [](float x) { return x == 0; })) << what << ", row " << row;
    } else {
      ASSERT_NEAR(log_sum, wanted_sum, 2e-2) << what << ", row " << row;
    }
  }
}

// Lengths around blocks, one and more new tokens, and ranks that have no block, or none that is visible.
TEST(SharedAttention, AbsorbedRowsAreThoseOfOneRank) {
  const std::vector<Deal> deals = {by_turns, at_random, others_than_first};
  using Lengths = std::vector<std::pair<int64_t, int64_t>>;
  for (const Implementation& with : implementations())
    for (const auto& [tokens, fresh] :
         with.on_gpu ? Lengths{{65, 1}, {66, 4}, {400, 67}}
                     : Lengths{{1, 1}, {63, 1}, {64, 4}, {65, 1}, {66, 4}, {129, 5}, {400, 1}, {400, 67}}) {
      World world{.shape = with.shape, .sequences = {{tokens, fresh}}};
      const Values wanted = attend_alone(world, with.make);
      for (const int32_t ranks : with.on_gpu ? std::vector{3} : std::vector{2, 3, 4})
        for (size_t deal = 0; deal < deals.size(); ++deal) {
          world.deal = deals[deal];
          expect_close(attend_together(world, with.make, ranks), wanted,
                       str_cat(with.name, ", ", tokens, " tokens, ", fresh, " new, ", ranks, " ranks, deal ", deal),
                       with.bound);
        }
    }
}

// A rank's share: means, and natural logs of sums of exponentials; -inf beside zeros where a row sees nothing.
TEST(SharedAttention, LatentsOfOneRankAreAttendedAsByTheDefinition) {
  const std::atomic<bool> abort{false};
  ThreadComms comms(3, abort);
  for (const Implementation& with : implementations())
    for (const std::optional<LatentFormat> cache :
         {std::optional<LatentFormat>(), std::optional(LatentFormat::kF8E4M3), std::optional(LatentFormat::kF8Tiles)})
      for (const int32_t rank : {0, 2}) {
        World world{.shape = with.shape,
                    .sequences = {{200, 1}, {66, 4}, {3, 1}, {400, 67}, {700, 1}, {1, 1}},
                    .deal = rank == 0 ? by_turns : at_random,
                    .cache = cache};
        if (!with.on_gpu) world.shape.latent = kLatentTile;
        const Values got = RankUnderTest(world, with.make, comms.of(rank)).results();
        const Values wanted = RankUnderTest(world, on_host().front().make, comms.of(rank)).results();
        expect_results(got, wanted,
                       str_cat(with.name, ", rank ", rank, ", cache ", cache ? latent_format_name(*cache) : ""));
      }
}

TEST(SharedAttention, SequencesOfBothFormsAndCachesOfEveryFormat) {
  constexpr auto kAbsorbed = MlaForm::kAbsorbed, kExpanded = MlaForm::kExpanded;
  using Cache = std::optional<LatentFormat>;
  const auto sequences = few_if_gpu_sanitizer<Sequence>({{200, 1, kAbsorbed},
                                                         {3, 1, kAbsorbed},
                                                         {260, 70, kExpanded},
                                                         {65, 65, kExpanded},
                                                         {190, 7, kAbsorbed},
                                                         {64, 9, kExpanded}},
                                                        {{200, 1, kAbsorbed}, {3, 1, kAbsorbed}, {130, 9, kExpanded}});
  const auto caches =
      few_if_gpu_sanitizer<Cache>({{}, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles}, {{}, LatentFormat::kF8Tiles});
  for (const Implementation& with : implementations())
    for (const Cache& cache : caches) {
      World world{.shape = with.shape, .sequences = sequences, .deal = at_random, .cache = cache};
      if (!with.on_gpu) world.shape.latent = kLatentTile;
      const Values wanted = attend_alone(world, with.make);
      for (const int32_t ranks : few_if_gpu_sanitizer<int32_t>({2, 4}, {3}))
        expect_close(attend_together(world, with.make, ranks), wanted, str_cat(with.name, ", ", ranks, " ranks"),
                     with.bound);
    }
}

// More keys than a piece of the CPU's, on each rank, and more threads' worth of rows than one tile.
TEST(SharedAttention, ManyKeys) {
  if (kSanitized) GTEST_SKIP() << "too slow";
  for (const Implementation& with : implementations()) {
    const World world{.shape = with.shape, .sequences = {{4500, 3}, {70, 1}}, .deal = at_random};
    expect_close(attend_together(world, with.make, 2), attend_alone(world, with.make), with.name, with.bound);
  }
}

// Expanded rows meet the same rows in the same order; of absorbed ones whose keys lie with one rank, the others add
// nothing.
TEST(SharedAttention, TheSameBitsWhereNothingIsSummedInAnotherOrder) {
  for (const Implementation& with : on_host()) {
    World expanded{.sequences = {{300, 130, MlaForm::kExpanded}}, .deal = at_random};
    EXPECT_EQ(attend_together(expanded, with.make, 3).at, attend_alone(expanded, with.make).at) << with.name;
    World absorbed{.sequences = {{300, 5}, {64, 64}, {1, 1}}, .deal = last_rank};
    EXPECT_EQ(attend_together(absorbed, with.make, 4).at, attend_alone(absorbed, with.make).at) << with.name;
  }
}

// A rank without keys, whose threads have no piece of work.
TEST(SharedAttention, ManyThreadsAttendLikeOne) {
  const World world{.sequences = {{300, 5}, {1, 1}}, .deal = last_rank};
  for (const Isa isa : isas_under_test())
    EXPECT_EQ(attend_together(world, cpu(isa, 3).make, 2).at, attend_alone(world, cpu(isa, 1).make).at)
        << isa_name(isa);
}

// So many rows that several exchanges take their turns.
TEST(SharedAttention, RowsOfSeveralExchanges) {
  if (kSanitized || gpu_sanitizer()) GTEST_SKIP() << "too slow";
  World world{.shape = {.heads = 64, .nope = 16, .rope = 16, .value = 16, .latent = 512, .softmax_scale = 0.1f},
              .sequences = {{64, 40}, {300, 300}},
              .deal = last_rank};
  const Implementation host = on_host().back();
  EXPECT_EQ(attend_together(world, host.make, 2).at, attend_alone(world, host.make).at);
  for (const Implementation& with : on_gpu()) {
    world.shape = with.shape;
    world.shape.heads = 64;
    expect_close(attend_together(world, with.make, 2), attend_alone(world, with.make), with.name, with.bound);
  }
}

// Pieces of 8,192 tokens, each of which ranks gather by itself.
TEST(SharedAttention, ExpandedRowsOnManyKeys) {
  for (const Implementation& with : gpu_sanitizer() ? std::vector<Implementation>() : on_gpu())
    for (const std::optional<LatentFormat> cache :
         {std::optional<LatentFormat>(), std::optional(LatentFormat::kF8Tiles)}) {
      const World world{
          .shape = with.shape, .sequences = {{17'000, 90, MlaForm::kExpanded}}, .deal = at_random, .cache = cache};
      expect_close(attend_together(world, with.make, 2), attend_alone(world, with.make), with.name, with.bound);
    }
}

TEST(SharedAttention, NoKeyAnywhereGivesZeros) {
  for (const Implementation& with : implementations()) {
    const World world{.shape = with.shape, .sequences = {{100, 3}}, .holes = true};
    const Values got = attend_together(world, with.make, 2);
    EXPECT_EQ(got.at, std::vector<float>(got.at.size(), 0.0f)) << with.name;
  }
}

bool all_nan(const Values& values) {
  return std::all_of(values.at.begin(), values.at.end(), [](float x) { return std::isnan(x); });
}

// As on one rank: the engine ends such a sequence with an error.
TEST(SharedAttention, ANanOfItsOwnShows) {
  for (const Implementation& with : implementations())
    for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded}) {
      const World world{.shape = with.shape, .sequences = {{200, 1, form}}, .first_nan = 70, .num_nan = 1};
      EXPECT_TRUE(all_nan(attend_together(world, with.make, 2))) << with.name;
    }
}

// A rank that has nothing but NaN is unlike one that has nothing. The first rank's keys are NaN, then all keys are.
TEST(SharedAttention, NothingButNanShows) {
  for (const Implementation& with : implementations())
    for (const int64_t num_nan : {64, 100}) {
      const World world{.shape = with.shape, .sequences = {{100, 1}}, .num_nan = num_nan};
      EXPECT_TRUE(all_nan(attend_alone(world, with.make))) << with.name << ", " << num_nan;
      EXPECT_TRUE(all_nan(attend_together(world, with.make, 2))) << with.name << ", " << num_nan;
    }
}

// What a GPU's ranks exchange is f16 of a sixteenth: a mean of two million is beyond it, and must not pass for another.
TEST(SharedAttention, AMeanBeyondTheRangeOfResultsShows) {
  const auto is_finite = [](float x) { return std::isfinite(x); };
  for (const Implementation& with : on_gpu()) {
    World world{.shape = with.shape, .sequences = {{100, 1}}, .num_nan = 100, .bad = f32_to_bf16(1e6f)};
    const Values alone = attend_alone(world, with.make), together = attend_together(world, with.make, 2);
    EXPECT_TRUE(std::all_of(alone.at.begin(), alone.at.end(), is_finite)) << with.name;
    EXPECT_TRUE(std::all_of(together.at.begin(), together.at.end(), is_finite)) << with.name;
    world.bad = f32_to_bf16(2e6f);
    const Values beyond = attend_together(world, with.make, 2);
    EXPECT_TRUE(std::none_of(beyond.at.begin(), beyond.at.end(), is_finite)) << with.name;
  }
}

// More than a piece of the CPU's: the pieces after it are good.
TEST(SharedAttention, AManyKeysLongNanShows) {
  if (kSanitized) GTEST_SKIP() << "too slow";
  for (const Implementation& with : implementations()) {
    const World world{.shape = with.shape, .sequences = {{1500, 1}}, .num_nan = 1024};
    EXPECT_TRUE(all_nan(attend_alone(world, with.make))) << with.name;
  }
}

}  // namespace
}  // namespace perigee
