#include "model/safetensors.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "model/test_weights.h"

namespace perigee {
namespace {

Result<SafetensorsHeader> parse(const std::string& bytes) {
  // An exact copy on the heap, so that a sanitizer sees a read past the end.
  const std::vector<uint8_t> copy(bytes.begin(), bytes.end());
  return parse_safetensors(copy);
}

std::string with_header(const std::string& header, size_t data_bytes, uint64_t length) {
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, 'x');
}

std::string with_header(const std::string& header, size_t data_bytes) {
  return with_header(header, data_bytes, header.size());
}

TEST(Safetensors, ReadsAWellFormedFile) {
  const auto header = parse(safetensors_bytes(
      {{"a", "F32", {2, 3}, std::string(24, 'a')}, {"empty", "I64", {0, 5}, ""}, {"scalar", "BF16", {}, "zz"}}));
  ASSERT_TRUE(header.ok()) << header.error().message;
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].name, "a");
  EXPECT_EQ(header->entries[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header->entries[2].begin, 24u);
  EXPECT_EQ(header->entries[2].end, 26u);
}

TEST(Safetensors, ATensorMayHaveEightDimensions) {
  const auto header = parse(safetensors_bytes({{"a", "U8", {1, 2, 1, 1, 3, 1, 1, 1}, "123456"}}));
  ASSERT_TRUE(header.ok()) << header.error().message;
  EXPECT_EQ(header->entries[0].shape.size(), 8u);
}

TEST(Safetensors, TruncatedAnywhereIsAnError) {
  const std::string whole = safetensors_bytes({{"a", "F32", {2, 3}, std::string(24, 'a')}, {"b", "U8", {5}, "bbbbb"}});
  ASSERT_TRUE(parse(whole).ok());
  for (size_t n = 0; n < whole.size(); ++n) {
    const auto cut = parse(whole.substr(0, n));
    ASSERT_FALSE(cut.ok()) << n;
    if (n < 8) continue;
    const size_t data = 24 + 5;
    const size_t missing = n < whole.size() - data ? whole.size() - data - n : whole.size() - n;
    EXPECT_NE(cut.error().message.find(fmt::format(" are there, {} are missing", missing)), std::string::npos)
        << n << ": " << cut.error().message;
  }
  EXPECT_FALSE(parse(whole + "x").ok());
}

TEST(Safetensors, EveryBitFlipIsAnErrorOrAHeader) {
  const std::string whole = safetensors_bytes({{"a", "F16", {2, 2}, "12345678"}});
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const auto header = parse(flipped);
    if (header.ok()) {
      EXPECT_EQ(header->entries.back().end, 8u);
    }
  }
}

TEST(Safetensors, HeaderLengths) {
  for (const uint64_t n : {uint64_t{0}, uint64_t{7}, uint64_t{3}, uint64_t{100}, uint64_t{1} << 31, uint64_t{1} << 32,
                           uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 7, kMaxSafetensorsHeader + 1}) {
    const auto header = parse(with_header("{}      ", 0, n));
    EXPECT_FALSE(header.ok()) << n;
  }
  EXPECT_TRUE(parse(with_header("{}      ", 0)).ok());
}

struct Malformed {
  const char* header;
  size_t data_bytes;
  const char* message;  // a part of it
};

TEST(Safetensors, MalformedHeaders) {
  const Malformed table[] = {
      {R"([])", 0, "expected an object"},
      {R"({"a": 1})", 0, "tensor a: expected an object"},
      {R"({"a": {"shape": [1], "data_offsets": [0, 1]}})", 1, "dtype"},
      {R"({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}})", 1, "unknown Q4"},
      {R"({"a": {"dtype": "U8", "data_offsets": [0, 1]}})", 1, "shape"},
      {R"({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}})", 1, "found -1"},
      {R"({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}})", 1, "found 1.0"},
      {R"({"a": {"dtype": "U8", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 1]}})", 1, "at most 8"},
      {R"({"a": {"dtype": "U8", "shape": [1099511627777], "data_offsets": [0, 1]}})", 1, "2^40"},
      {R"({"a": {"dtype": "F32", "shape": [1099511627776, 4194304], "data_offsets": [0, 0]}})", 0, "2^64"},
      {R"({"a": {"dtype": "U8", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}})", 0, "2^64"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}})", 1, "two integers"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}})", 1, "begin <= end"},
      {R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})", 1,
       "2 bytes of tensors, 1 are there, 1 are missing"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [18446744073709551615, 0]}})", 1, "integers >= 0"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}})", 1, "integers >= 0"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}})", 3, "expected 4 bytes for F32 [1], found 3"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 5]}})", 5, "expected 4 bytes for F32 [1], found 5"},
      {R"({"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 2]}})", 2, "expected 1 bytes for U8 [], found 2"},
      {R"({"a": {"dtype": "U8", "shape": [2, 0], "data_offsets": [0, 1]}})", 1, "expected 0 bytes for U8 [2, 0]"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "code": "x"}})", 1, "unknown field code"},
      {R"({"": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})", 1, "a name of 1"},
      {R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
           "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}})",
       3, "tensor b: expected to begin at byte 2"},
      {R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
           "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})",
       2, "overlap"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
           "b": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]}})",
       3, "hole"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})", 2, "hole"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})", 2, "expected 1 bytes of data, found 2"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
           "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})",
       2, "twice"},
      {R"({"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}})", 1, "twice"},
      {R"({"__metadata__": {"format": 1}})", 0, "strings only"},
      {R"({"__metadata__": []})", 0, "expected an object"},
      {R"({"a": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]})", 0, "header"},
      {"PK\x03\x04", 0, "header"},
  };
  for (const Malformed& m : table) {
    const auto header = parse(with_header(m.header, m.data_bytes));
    ASSERT_FALSE(header.ok()) << m.header;
    EXPECT_NE(header.error().message.find(m.message), std::string::npos)
        << header.error().message << " lacks " << m.message;
  }
}

class Sharded : public ::testing::Test {
 protected:
  void write_shards() {
    folder_.write("one.safetensors", safetensors_bytes({{"a", "U8", {1}, "a"}, {"b", "U8", {1}, "b"}}));
    folder_.write("two.safetensors", safetensors_bytes({{"c", "U8", {1}, "c"}}));
  }
  std::string open_error(const std::string& weight_map) {
    folder_.write("model.safetensors.index.json", "{\"metadata\": {}, \"weight_map\": " + weight_map + "}");
    const auto files = WeightFiles::open(folder_.path());
    return files.ok() ? "" : files.error().message;
  }
  TempFolder folder_;
};

TEST_F(Sharded, FindsTensorsInTheirFiles) {
  write_shards();
  ASSERT_EQ(open_error(R"({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})"), "");
  const auto files = WeightFiles::open(folder_.path());
  ASSERT_NE(files->find("c"), nullptr);
  EXPECT_EQ(files->find("c")->data[0], 'c');
  EXPECT_EQ(files->where(*files->find("c")), folder_.path() + "/two.safetensors");
  EXPECT_EQ(files->find("d"), nullptr);
}

TEST_F(Sharded, BadIndexes) {
  write_shards();
  namespace fs = std::filesystem;
  const TempFolder outside;
  outside.write("out.safetensors", safetensors_bytes({{"a", "U8", {1}, "a"}}));
  fs::create_symlink(outside.path() + "/out.safetensors", folder_.path() + "/link.safetensors");
  fs::create_symlink(outside.path(), folder_.path() + "/dir.safetensors");
  fs::create_symlink("/dev/zero", folder_.path() + "/zero.safetensors");
  ASSERT_EQ(::mkfifo((folder_.path() + "/fifo.safetensors").c_str(), 0600), 0);
  fs::create_directory(folder_.path() + "/sub.safetensors");
  const std::pair<const char*, const char*> table[] = {
      {R"({"a": "../one.safetensors"})", "must be a name inside the folder"},
      {R"({"a": "/etc/x.safetensors"})", "must be a name inside the folder"},
      {R"({"a": "sub/x.safetensors"})", "must be a name inside the folder"},
      {R"({"a": "one.safetensors\u0000.safetensors"})", "must be a name inside the folder"},
      {R"({"a": "model.bin"})", "expected a *.safetensors file, found model.bin"},
      {R"({"a": 1})", "expected a file name, found number"},
      {R"({})", "weight_map"},
      {R"([])", "weight_map"},
      {R"({"a": "link.safetensors"})", "leaves the model folder"},
      {R"({"a": "zero.safetensors"})", "leaves the model folder"},
      {R"({"a": "dir.safetensors"})", "leaves the model folder"},
      {R"({"a": "fifo.safetensors"})", "is not a regular file"},
      {R"({"a": "sub.safetensors"})", "is not a regular file"},
      {R"({"a": "none.safetensors"})", "none.safetensors"},
      {R"({"a": "none.safetensors"})", "index.json names this file, so the model is not whole: fetch it again"},
      {R"({"a": "one.safetensors"})", "tensor b is not in"},
      {R"({"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"})",
       "expected in one.safetensors, found in no file"},
      {R"({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})",
       "expected in two.safetensors, found in one"},
      {R"({"a": "one.safetensors", "a": "two.safetensors"})", "twice"},
  };
  for (const auto& [map, message] : table) {
    const std::string error = open_error(map);
    EXPECT_NE(error.find(message), std::string::npos) << map << ": " << error << " lacks " << message;
    EXPECT_NE(error.find(folder_.path()), std::string::npos) << error;
  }
}

TEST_F(Sharded, OtherWeightFilesAreNotRead) {
  folder_.write("pytorch_model.bin", "x");
  const auto files = WeightFiles::open(folder_.path());
  ASSERT_FALSE(files.ok());
  EXPECT_EQ(files.error().code, Code::kNotFound);
  EXPECT_NE(files.error().message.find("model.safetensors"), std::string::npos);
  folder_.write("model.safetensors", "PK\x03\x04 is a zip archive");
  const auto zip = WeightFiles::open(folder_.path());
  ASSERT_FALSE(zip.ok());
  EXPECT_NE(zip.error().message.find("model.safetensors: header length"), std::string::npos) << zip.error().message;
}

TEST_F(Sharded, APointerOfGitLfsIsSaidToBeOne) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 19983304\n";
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    folder_.write(name, pointer);
    const auto files = WeightFiles::open(folder_.path());
    ASSERT_FALSE(files.ok());
    EXPECT_EQ(files.error().message,
              fmt::format("{}/{}: is a Git LFS pointer, not the file itself: run git lfs pull in its folder",
                          folder_.path(), name));
  }
}

TEST_F(Sharded, ALinkInsideTheFolderIsFollowed) {
  write_shards();
  std::filesystem::create_symlink("one.safetensors", folder_.path() + "/model.safetensors");
  const auto files = WeightFiles::open(folder_.path());
  EXPECT_TRUE(files.ok()) << files.error().message;
}

// As the cache of Hugging Face has a model: links to files named by their hash, and none to anywhere else.
TEST(Snapshot, LinksToItsBlobsAreFollowed) {
  namespace fs = std::filesystem;
  const TempFolder cache;
  const fs::path model = fs::path(cache.path()) / "models--a--b", revision = model / "snapshots" / "0123";
  for (const fs::path& folder : {revision, model / "blobs", model / "refs", revision / "blobs"})
    fs::create_directories(folder);
  const std::string bytes = safetensors_bytes({{"a", "U8", {1}, "x"}});
  cache.write("models--a--b/blobs/4567", bytes);
  cache.write("models--a--b/refs/main", bytes);
  fs::create_symlink("../../blobs/4567", revision / "model.safetensors");
  const auto files = WeightFiles::open(revision);
  ASSERT_TRUE(files.ok()) << files.error().message;
  EXPECT_EQ(files->find("a")->data[0], 'x');
  fs::remove(revision / "model.safetensors");
  fs::create_symlink("../../refs/main", revision / "model.safetensors");
  EXPECT_NE(WeightFiles::open(revision).error().message.find("leaves the model folder"), std::string::npos);
  const fs::path plain = model / "other" / "0123";  // blobs beside any other folder are not its own
  fs::create_directories(plain);
  fs::create_symlink("../../blobs/4567", plain / "model.safetensors");
  EXPECT_NE(WeightFiles::open(plain).error().message.find("leaves the model folder"), std::string::npos);
}

}  // namespace
}  // namespace perigee
