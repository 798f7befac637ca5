// Ranks that share the blocks of each sequence (decode context parallelism) attend like one rank that has them all.
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "backends.h"
#include "comm/thread_comms.h"

namespace perigee {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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

struct World {
  MlaShape shape{.heads = 12, .nope = 16, .rope = 8, .value = 20, .latent = 32, .softmax_scale = 0.3f};
  std::vector<Sequence> sequences;
  Deal deal = by_turns;
  std::optional<LatentFormat> cache = {};  // none: numbers as the backend computes with them
  bool holes = false;                      // no rank has any block
  // Latents of positions [first, first + count) are NaN.
  int64_t first_nan = 0, num_nan = 0;

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
};

Implementation cpu(Isa isa, int num_threads) {
  return {isa_name(isa), [=](Comm& dcp) {
            auto ops = make_cpu_ops({.num_threads = num_threads, .isa = isa, .dcp = dcp});
            CHECK(ops.ok(), ops.error().message);
            return std::move(*ops);
          }};
}

std::vector<Implementation> implementations() {
  std::vector<Implementation> all = {{"ref", [](Comm& dcp) { return make_ref_ops(Comm::alone(), dcp); }}};
  for (const Isa isa : isas_under_test()) all.push_back(cpu(isa, 1));
  return all;
}

// The blocks of one sequence that lie with a rank.
struct Table {
  std::vector<uint8_t> owners;
  std::vector<int32_t> here, pages;
};

// One rank of the group: its cache, which holds NaN wherever it does not write, and its heads.
class RankUnderTest {
 public:
  RankUnderTest(const World& world, const MakeOps& make, Comm& dcp) : world_(world), dcp_(dcp), ops_(make(dcp)) {
    const MlaShape& s = world.shape;
    shape_ = s;
    shape_.heads = s.heads / dcp.size();
    layer_.format = world.cache.value_or(latent_format(ops_->activation_dtype()));
    if (layer_.format == LatentFormat::kF8E4M3) layer_.scale = 0.37f;
    layer_.row_bytes = latent_row_bytes(layer_.format, s.latent, s.rope);
    layer_.page_bytes = 64 * layer_.row_bytes + 128;
    int64_t num_pages = 1;
    for (const Sequence& sequence : world.sequences) num_pages += (sequence.tokens + 63) / 64;
    memory_.assign(static_cast<size_t>(num_pages * layer_.page_bytes),
                   layer_.format == LatentFormat::kF8E4M3 ? 0x7F : 0xFF);
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
    std::vector<SequenceRows> rows;
    int32_t row = 0;
    for (size_t i = 0; i < tables_.size(); ++i) {
      const Sequence& s = world_.sequences[i];
      rows.push_back(rows_of(i, s.tokens - s.fresh, s.fresh));
      rows.back().first_row = row;
      rows.back().form = s.form;
      row += static_cast<int32_t>(s.fresh);
    }
    Batch batch;
    batch.sequences = rows;
    const int64_t up_rows = world_.shape.nope + world_.shape.value, latent = world_.shape.latent;
    Stored up = store(WeightFormat::kBF16, world_.shape.heads * up_rows, latent, 41);
    up.raw.out = shape_.heads * up_rows;
    up.raw.data = up.data.data() + dcp_.rank() * up.raw.out * latent * 2;
    const int64_t width = shape_.heads * shape_.q_head();
    const Tensor q =
        activation(*ops_, row, width * dcp_.size(), 42, ops_->wide_dtype()).columns(dcp_.rank() * width, width);
    return fetch(*ops_, ops_->mla_attend(q, ops_->pack_mla_up(up.raw, shape_), shape_, batch, layer_));
  }

 private:
  SequenceRows rows_of(size_t i, int64_t position, int64_t count) const {
    const Table& table = tables_[i];
    SequenceRows rows{.num_tokens = static_cast<int32_t>(count),
                      .position = static_cast<int32_t>(position),
                      .pages = table.pages.data()};
    if (dcp_.size() > 1) rows.shared = {.here = table.here, .owners = table.owners.data()};
    return rows;
  }
  // The first half last: a row that lies elsewhere must not be stored over one that lies here.
  void write() {
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t tokens = world_.sequences[i].tokens;
      ops_->begin_step();
      const Tensor c = activation(*ops_, tokens, world_.shape.latent, 100 + i, DType::kF32);
      for (int64_t t = 0; t < world_.num_nan; ++t) c.row<float>(world_.first_nan + t)[0] = kNan;
      const Tensor k_rope = activation(*ops_, tokens, world_.shape.rope, 200 + i, DType::kF32);
      for (const auto& [position, count] : {std::pair{tokens / 2, tokens - tokens / 2}, {int64_t{0}, tokens / 2}}) {
        if (count == 0) continue;
        const SequenceRows rows = rows_of(i, position, count);
        Batch batch;
        batch.sequences = {&rows, 1};
        ops_->write_latent(c.row_range(position, count), k_rope.row_range(position, count), batch, layer_);
      }
    }
  }

  const World& world_;
  Comm& dcp_;
  std::unique_ptr<Ops> ops_;
  MlaShape shape_;
  LatentLayer layer_;
  std::vector<uint8_t> memory_;
  std::vector<Table> tables_;
};

Values attend_alone(const World& world, const MakeOps& make) {
  return RankUnderTest(world, make, Comm::alone()).attend();
}

// The heads of all ranks side by side.
Values attend_together(const World& world, const MakeOps& make, int32_t size) {
  const std::atomic<bool> abort{false};
  ThreadComms comms(size, abort);
  std::vector<Values> parts(static_cast<size_t>(size));
  std::vector<std::jthread> threads;
  for (int32_t r = 0; r < size; ++r)
    threads.emplace_back([&, r] { parts[static_cast<size_t>(r)] = RankUnderTest(world, make, comms.of(r)).attend(); });
  threads.clear();
  Values out{.rows = parts[0].rows, .cols = parts[0].cols * size, .at = {}};
  for (int64_t row = 0; row < out.rows; ++row)
    for (const Values& part : parts) {
      const auto from = part.at.begin() + row * part.cols;
      out.at.insert(out.at.end(), from, from + part.cols);
    }
  return out;
}

double bound_of(const std::string& name) {
  return name == "ref" ? 3e-6 : kBound;
}

// Lengths around blocks, one and more new tokens, and ranks that have no block, or none that is visible.
TEST(SharedAttention, AbsorbedRowsAreThoseOfOneRank) {
  const std::vector<Deal> deals = {by_turns, at_random, others_than_first};
  for (const Implementation& with : implementations())
    for (const auto& [tokens, fresh] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {63, 1}, {64, 4}, {65, 1}, {66, 4}, {129, 5}, {400, 1}, {400, 67}}) {
      World world{.sequences = {{tokens, fresh}}};
      const Values wanted = attend_alone(world, with.make);
      for (const int32_t ranks : {2, 3, 4})
        for (size_t deal = 0; deal < deals.size(); ++deal) {
          world.deal = deals[deal];
          expect_close(attend_together(world, with.make, ranks), wanted,
                       str_cat(with.name, ", ", tokens, " tokens, ", fresh, " new, ", ranks, " ranks, deal ", deal),
                       bound_of(with.name));
        }
    }
}

TEST(SharedAttention, SequencesOfBothFormsAndCachesOfEveryFormat) {
  constexpr auto kAbsorbed = MlaForm::kAbsorbed, kExpanded = MlaForm::kExpanded;
  for (const Implementation& with : implementations())
    for (const std::optional<LatentFormat> cache :
         {std::optional<LatentFormat>(), std::optional(LatentFormat::kF8E4M3), std::optional(LatentFormat::kF8Tiles)}) {
      World world{.shape = {.heads = 12, .nope = 16, .rope = 8, .value = 20, .latent = 128, .softmax_scale = 0.3f},
                  .sequences = {{200, 1, kAbsorbed},
                                {3, 1, kAbsorbed},
                                {260, 70, kExpanded},
                                {65, 65, kExpanded},
                                {190, 7, kAbsorbed},
                                {64, 9, kExpanded}},
                  .deal = at_random,
                  .cache = cache};
      const Values wanted = attend_alone(world, with.make);
      for (const int32_t ranks : {2, 4})
        expect_close(attend_together(world, with.make, ranks), wanted, str_cat(with.name, ", ", ranks, " ranks"),
                     bound_of(with.name));
    }
}

// More keys than a piece of the CPU's, on each rank, and more threads' worth of rows than one tile.
TEST(SharedAttention, ManyKeys) {
  if (kSanitized) GTEST_SKIP() << "too slow";
  for (const Implementation& with : implementations()) {
    const World world{.sequences = {{4500, 3}, {70, 1}}, .deal = at_random};
    expect_close(attend_together(world, with.make, 2), attend_alone(world, with.make), with.name, bound_of(with.name));
  }
}

// Expanded rows meet the same rows in the same order; of absorbed ones whose keys lie with one rank, the others add
// nothing.
TEST(SharedAttention, TheSameBitsWhereNothingIsSummedInAnotherOrder) {
  for (const Implementation& with : implementations()) {
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
  if (kSanitized) GTEST_SKIP() << "too slow";
  const Implementation with = implementations().back();
  const World world{.shape = {.heads = 64, .nope = 16, .rope = 16, .value = 16, .latent = 512, .softmax_scale = 0.1f},
                    .sequences = {{64, 40}, {300, 300}},
                    .deal = last_rank};
  EXPECT_EQ(attend_together(world, with.make, 2).at, attend_alone(world, with.make).at);
}

TEST(SharedAttention, NoKeyAnywhereGivesZeros) {
  for (const Implementation& with : implementations()) {
    const World world{.sequences = {{100, 3}}, .holes = true};
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
      const World world{.sequences = {{200, 1, form}}, .first_nan = 70, .num_nan = 1};
      EXPECT_TRUE(all_nan(attend_together(world, with.make, 2))) << with.name;
    }
}

// A rank that has nothing but NaN is unlike one that has nothing. The first rank's keys are NaN, then all keys are.
TEST(SharedAttention, NothingButNanShows) {
  for (const Implementation& with : implementations())
    for (const int64_t num_nan : {64, 100}) {
      const World world{.sequences = {{100, 1}}, .num_nan = num_nan};
      EXPECT_TRUE(all_nan(attend_alone(world, with.make))) << with.name << ", " << num_nan;
      EXPECT_TRUE(all_nan(attend_together(world, with.make, 2))) << with.name << ", " << num_nan;
    }
}

// More than a piece of the CPU's: the pieces after it are good.
TEST(SharedAttention, AManyKeysLongNanShows) {
  if (kSanitized) GTEST_SKIP() << "too slow";
  for (const Implementation& with : implementations()) {
    const World world{.sequences = {{1500, 1}}, .num_nan = 1024};
    EXPECT_TRUE(all_nan(attend_alone(world, with.make))) << with.name;
  }
}

}  // namespace
}  // namespace perigee
