// Ranks that each have the whole cache and deal the sequences out give the bits of one rank that has all heads.
#include "ops/dealt_attention.h"

#include <thread>

#include "backends.h"
#include "comm/thread_comms.h"

namespace perigee {
namespace {

constexpr MlaShape kAllHeads{.heads = 8, .nope = 16, .rope = 8, .value = 20, .latent = 128, .softmax_scale = 0.3f};

// The newest `fresh` of a sequence's tokens are the step's.
struct Sequence {
  int32_t tokens = 1, fresh = 1;
  MlaForm form = MlaForm::kAbsorbed;
};

struct Attended {
  Values out;
  bool dealt = false;
};

// This rank's heads over a cache that it writes itself.
Attended attend(const std::vector<Sequence>& sequences, LatentFormat format, Isa isa, Comm& comm) {
  auto made = make_cpu_ops({.num_threads = 1, .isa = isa, .comm = comm});
  CHECK(made.ok(), made.error().message);
  Ops& ops = **made;
  MlaShape shape = kAllHeads;
  shape.heads /= comm.size();
  LatentLayer cache{.row_bytes = latent_row_bytes(format, shape.latent, shape.rope), .format = format};
  cache.page_bytes = kRowsOfBlock * cache.row_bytes;
  int32_t num_pages = 0, num_rows = 0;
  std::vector<std::vector<int32_t>> pages;
  for (const Sequence& s : sequences) {
    for (pages.emplace_back(); std::ssize(pages.back()) * kRowsOfBlock < s.tokens;) pages.back().push_back(num_pages++);
    num_rows += s.fresh;
  }
  Buffer memory(static_cast<size_t>(num_pages * cache.page_bytes));
  std::fill_n(memory.data(), memory.size(), uint8_t{0xFF});  // NaN
  cache.base = memory.data();
  std::vector<SequenceRows> rows;
  int32_t first_row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    const SequenceRows whole{.num_tokens = s.tokens, .pages = pages[i].data()};
    Batch batch;
    batch.sequences = {&whole, 1};
    ops.begin_step();
    const Tensor c = activation(ops, s.tokens, shape.latent, 10 + i, DType::kF32);
    ops.write_latent(c, activation(ops, s.tokens, shape.rope, 50 + i, DType::kF32), batch, cache);
    rows.push_back({.first_row = first_row,
                    .num_tokens = s.fresh,
                    .position = s.tokens - s.fresh,
                    .pages = pages[i].data(),
                    .form = s.form});
    first_row += s.fresh;
  }
  Batch batch;
  batch.sequences = rows;
  const int64_t up_rows = shape.nope + shape.value, width = shape.heads * shape.q_head();
  Stored kv_b = store(WeightFormat::kBF16, kAllHeads.heads * up_rows, shape.latent, 2);
  kv_b.raw.out = shape.heads * up_rows;
  kv_b.raw.data = kv_b.data.data() + comm.rank() * kv_b.raw.out * shape.latent * 2;
  const MlaUpWeight up = ops.pack_mla_up(kv_b.raw, shape);
  poison(ops, 8 << 20);
  const Tensor all = activation(ops, num_rows, comm.size() * width, 3, DType::kF32);
  const Tensor q = ops.arena().tensor(DType::kF32, num_rows, width);
  for (int32_t row = 0; row < num_rows; ++row)
    std::copy_n(all.row<const float>(row) + comm.rank() * width, width, q.row<float>(row));
  Attended out{.dealt = attend_dealt(ops, q, up, shape, batch, cache).has_value()};
  out.out = fetch(ops, ops.mla_attend(q, up, shape, batch, cache));
  return out;
}

// Whether the ranks dealt, which they all find alike. Their heads have the bits of one rank's.
bool deal_like_one_rank(const std::vector<Sequence>& sequences, LatentFormat format, Isa isa, int32_t size) {
  const Values one = attend(sequences, format, isa, Comm::alone()).out;
  const std::atomic<bool> abort{false};
  ThreadComms comms(size, abort);
  std::vector<Attended> parts(static_cast<size_t>(size));
  std::vector<std::jthread> threads;
  for (int32_t r = 0; r < size; ++r)
    threads.emplace_back([&, r] { parts[static_cast<size_t>(r)] = attend(sequences, format, isa, comms.of(r)); });
  threads.clear();
  for (size_t r = 0; r < parts.size(); ++r) {
    const Values& part = parts[r].out;
    EXPECT_EQ(parts[r].dealt, parts[0].dealt) << r;
    for (int64_t row = 0; row < part.rows; ++row)
      for (int64_t c = 0; c < part.cols; ++c) {
        const auto whole_c = static_cast<int64_t>(r) * part.cols + c;
        const float got = part.at[static_cast<size_t>(row * part.cols + c)];
        EXPECT_EQ(got, one.at[static_cast<size_t>(row * one.cols + whole_c)]) << "rank " << r << ", row " << row;
        if (testing::Test::HasFailure()) return parts[0].dealt;
      }
  }
  return parts[0].dealt;
}

TEST(DealtAttention, HasTheBitsOfOneRank) {
  const std::vector<Sequence> even(8, {.tokens = 400, .fresh = 1});
  std::vector<Sequence> verified(5, {.tokens = 1400, .fresh = 4});  // several rows each, more keys than a piece
  verified.push_back({.tokens = 1300, .fresh = 2});
  for (const Isa isa : isas_under_test())
    for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles}) {
      SCOPED_TRACE(str_cat(isa_name(isa), ", ", latent_format_name(format)));
      for (const int32_t size : {2, 4}) EXPECT_TRUE(deal_like_one_rank(even, format, isa, size)) << size << " ranks";
      EXPECT_TRUE(deal_like_one_rank(verified, format, isa, 2));
    }
}

TEST(DealtAttention, LeavesOthersAlone) {
  const Isa isa = isas_under_test().back();
  const Sequence usual{.tokens = 400};
  const std::vector<std::vector<Sequence>> others = {
      {usual},                                                             // one sequence
      {usual, usual, usual, {.tokens = 400, .form = MlaForm::kExpanded}},  // a prompt among them
      std::vector<Sequence>(8, {.tokens = 80}),                            // short ones
      {{.tokens = 1200}, usual},                                           // uneven ones
  };
  for (const std::vector<Sequence>& sequences : others)
    EXPECT_FALSE(deal_like_one_rank(sequences, LatentFormat::kBF16, isa, 2)) << sequences.size();
  // Their rows would divide evenly enough among 8, but one rank has none.
  EXPECT_FALSE(deal_like_one_rank(std::vector<Sequence>(7, usual), LatentFormat::kBF16, isa, 8));
}

}  // namespace
}  // namespace perigee
