// Windows of matrices, as tensor-parallel ranks pack them, on every backend: a window computes what those rows and
// columns of the whole compute, wherever it cuts blocks of scales; products of column shards add up to the whole.
#include <algorithm>

#include "backends.h"

namespace perigee {
namespace {

// Cuts at blocks of 128 rows and columns, at groups of 32 and inside of both.
struct Cut {
  int64_t first_row, rows, first_column, columns;
};

TEST(Windows, OfLinearWeights) {
  const auto ref = make_ref_ops();
  for (Backend& backend : backends())
    for (const WeightFormat format :
         {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kF8Block128, WeightFormat::kInt4Group32}) {
      const Stored stored = store(format, 400, 512, 91);
      for (const Cut& cut :
           {Cut{0, 400, 0, 512}, {128, 128, 128, 256}, {72, 200, 256, 256}, {260, 4, 0, 128}, {100, 56, 40, 328}})
        for (const int64_t rows : ends_if_sanitized<int64_t>({1, 40})) {
          const RawMatrix part = window(stored.raw, cut.first_row, cut.rows, cut.first_column, cut.columns);
          poison(*backend.ops, 4 << 20);
          ref->begin_step();
          const auto run = [&](Ops& ops) {
            return fetch(ops, ops.linear(activation(ops, rows, cut.columns, 5), ops.pack_linear(part), DType::kF32));
          };
          expect_close(run(*backend.ops), run(*ref),
                       str_cat(backend.name, " format ", static_cast<int>(format), " rows from ", cut.first_row,
                               ", columns from ", cut.first_column, ", batch ", rows));
        }
    }
}

// Partial sums of experts whose inner dimension is dealt to ranks: 512 keeps blocks and groups whole, 160 and 48 do
// not.
TEST(Windows, OfExpertsAddUpToTheWhole) {
  const auto ref = make_ref_ops();
  constexpr int64_t kHidden = 256, kRows = 3;
  for (Backend& backend : backends())
    for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF8Block128, WeightFormat::kInt4Group32})
      for (const auto& [inter, size] : {std::pair<int64_t, int64_t>{512, 2}, {320, 2}, {96, 2}, {192, 4}}) {
        const Stored gate = store(format, inter, kHidden, 61), up = store(format, inter, kHidden, 62),
                     down = store(format, kHidden, inter, 63);
        const auto run = [&](Ops& ops, const RawExpert& expert) {
          const ExpertWeights weights = ops.pack_experts({&expert, 1});
          const Routing routing{.num_tokens = kRows,
                                .top_k = 1,
                                .ids = const_cast<int32_t*>(place(ops, {0, 0, 0}).data()),
                                .weights = ops.arena().array<float>(kRows).data()};
          const std::vector<float> ones(kRows, 1.0f);
          ops.copy(routing.weights, ones.data(), ones.size() * sizeof(float));
          return fetch(ops, ops.moe_experts(activation(ops, kRows, kHidden, 7), routing, weights));
        };
        ref->begin_step();
        const Values whole = run(*ref, {gate.raw, up.raw, down.raw});
        Values sum{.rows = whole.rows, .cols = whole.cols, .at = std::vector<float>(whole.at.size())};
        for (int64_t rank = 0; rank < size; ++rank) {
          poison(*backend.ops, 4 << 20);
          const int64_t count = inter / size, first = rank * count;
          const Values part =
              run(*backend.ops, {window(gate.raw, first, count, 0, kHidden), window(up.raw, first, count, 0, kHidden),
                                 window(down.raw, 0, kHidden, first, count)});
          for (size_t i = 0; i < sum.at.size(); ++i) sum.at[i] += part.at[i];
        }
        expect_close(sum, whole,
                     str_cat(backend.name, " format ", static_cast<int>(format), " inner ", inter, " on ", size));
      }
}

// Another rank has token 0.
TEST(Windows, OfEmbeddings) {
  const Stored table = store(WeightFormat::kBF16, 50, 192, 3);
  for (Backend& backend : backends()) {
    Ops& ops = *backend.ops;
    poison(ops, 4 << 20);
    const auto rows = [&](const RawMatrix& matrix, const std::vector<int32_t>& tokens) {
      return fetch(ops, ops.embed(ops.pack_embed(matrix), place(ops, tokens)));
    };
    Values want = rows(table.raw, {0, 19, 12});
    std::fill_n(want.at.begin(), 192, 0.0f);
    expect_close(rows(window(table.raw, 10, 20, 0, 192), {0, 19, 12}), want, backend.name, 0);
  }
}

}  // namespace
}  // namespace perigee
