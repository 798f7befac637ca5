// Where a request ends: what two readers could frame differently is refused, and nothing after it is ever served.
#include <gtest/gtest.h>

#include "server/http_body.h"
#include "server/http_test.h"
#include "server/http_types.h"

namespace perigee {
namespace {

constexpr std::string_view kPost = "POST /a HTTP/1.1\r\nHost: x\r\n";
constexpr std::string_view kSmuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";

struct Refused {
  std::string head;  // after kPost, unless it starts with "="
  std::string body;
  int status;
};

const std::string kCoding = "Transfer-Encoding: ";
const std::string kLength = "Content-Length: ";

std::vector<Refused> coding_faults() {
  const std::string chunks = "1\r\na\r\n0\r\n\r\n";
  return {
      {kCoding + "gzip, chunked\r\n\r\n", chunks, 501},
      {kCoding + "gzip\r\n\r\n", chunks, 501},
      {kCoding + "identity\r\n\r\n", chunks, 501},
      {kCoding + "xchunked\r\n\r\n", chunks, 501},
      {kCoding + "chunked, gzip\r\n\r\n", chunks, 501},
      {kCoding + "chunked, chunked\r\n\r\n", chunks, 400},
      {kCoding + "chunked,\r\n\r\n", chunks, 400},
      {kCoding + "chunked;q=1\r\n\r\n", chunks, 400},
      {kCoding + "\"chunked\"\r\n\r\n", chunks, 400},
      {kCoding + "\vchunked\r\n\r\n", chunks, 400},
      {kCoding + "\r\n\r\n", chunks, 400},
      {kCoding + "\r\n chunked\r\n\r\n", chunks, 400},
      {kCoding + "chunked\r\n" + kCoding + "chunked\r\n\r\n", chunks, 400},
      {kCoding + "chunked\r\n" + kCoding + "identity\r\n\r\n", chunks, 400},
      {kCoding + "chunked\r\n" + kLength + "5\r\n\r\n", chunks, 400},
      {kLength + "5\r\n" + kCoding + "chunked\r\n\r\n", chunks, 400},
      {kLength + "5\r\n" + kCoding + "identity\r\n\r\n", "abcde", 501},
      {"Transfer-Encoding : chunked\r\n\r\n", chunks, 400},
      {"Transfer\tEncoding: chunked\r\n\r\n", chunks, 400},
      {"=POST /a HTTP/1.0\r\n" + kCoding + "chunked\r\n\r\n", chunks, 400},
  };
}

std::vector<Refused> length_faults() {
  return {
      {kLength + "2, 2\r\n\r\n", "ab", 400},
      {kLength + "2\r\n" + kLength + "2\r\n\r\n", "ab", 400},
      {kLength + "2\r\n" + kLength + "3\r\n\r\n", "ab", 400},
      {kLength + "+2\r\n\r\n", "ab", 400},
      {kLength + "-1\r\n\r\n", "ab", 400},
      {kLength + "0x2\r\n\r\n", "ab", 400},
      {kLength + "2 2\r\n\r\n", "ab", 400},
      {kLength + "2.0\r\n\r\n", "ab", 400},
      {kLength + "\r\n\r\n", "ab", 400},
      {kLength + "\xEF\xBC\x92\r\n\r\n", "ab", 400},
      {kLength + "18446744073709551618\r\n\r\n", "ab", 413},
      {"Content-Length : 2\r\n\r\n", "ab", 400},
      {"X: y\n" + kLength + "2\r\n\r\n", "ab", 400},
      {"X: y\r" + kLength + "2\r\n\r\n", "ab", 400},
  };
}

std::vector<Refused> head_faults() {
  return {
      {"X: y\r\n z\r\n\r\n", "", 400},
      {"X: y\r\n\tz\r\n\r\n", "", 400},
      {"X: a" + std::string(1, '\0') + "b\r\n\r\n", "", 400},
      {"X\r\n\r\n", "", 400},
      {": y\r\n\r\n", "", 400},
      {"X(: y\r\n\r\n", "", 400},
      {"Host: y\r\n\r\n", "", 400},
      {"Expect: 200-maybe\r\n\r\n", "", 417},
      {"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n", "a", 415},
      {"=GET /a HTTP/1.1\r\n\r\n", "", 400},
      {"=GET /a HTTP/0.9\r\nHost: x\r\n\r\n", "", 400},
      {"=GET /a HTTP/2.0\r\nHost: x\r\n\r\n", "", 505},
      {"=GET /a\r\nHost: x\r\n\r\n", "", 400},
      {"=GET  /a HTTP/1.1\r\nHost: x\r\n\r\n", "", 400},
      {"=GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", "", 400},
      {"=GET /\xC3\xA4 HTTP/1.1\r\nHost: x\r\n\r\n", "", 400},
      {"=G(T /a HTTP/1.1\r\nHost: x\r\n\r\n", "", 400},
      {"=nonsense\r\n\r\n", "", 400},
      {"=\r\n\r\n", "", 400},
  };
}

std::vector<Refused> chunk_faults() {
  return {
      {kCoding + "chunked\r\n\r\n", "zz\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "-1\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "0x1\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", " 1\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "1 \r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "1\na\n0\n\n", 400},
      {kCoding + "chunked\r\n\r\n", "1\r\nab\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "1\r\na\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "1;a\nb\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "1;" + std::string(300, 'e') + "\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", std::string(300, '0') + "1\r\na\r\n0\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "0\r\nA: b\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "0\r\n" + std::string(9000, 't') + "\r\n\r\n", 400},
      {kCoding + "chunked\r\n\r\n", "FFFFFFFFFFFFFFFFF\r\na", 413},
  };
}

std::vector<Refused> framing_faults() {
  std::vector<Refused> all;
  for (const auto& some : {coding_faults(), length_faults(), head_faults(), chunk_faults()})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

TEST_F(HttpTest, AmbiguousFramingIsRefusedAndNothingAfterItIsServed) {
  start({});
  for (const Refused& fault : framing_faults()) {
    const bool whole = fault.head.starts_with('=');
    const std::string bytes = (whole ? fault.head.substr(1) : std::string(kPost) + fault.head) + fault.body;
    TestClient client(server_->port());
    client.send(bytes + std::string(kSmuggled));
    const auto reply = client.read_reply();
    EXPECT_EQ(reply.status, fault.status) << bytes;
    EXPECT_NE(reply.head.find("\r\nConnection: close\r\n"), std::string::npos) << bytes;
    client.read_to_end();
    EXPECT_TRUE(client.ended() && client.text().empty()) << bytes << " was followed by " << client.text();
  }
  EXPECT_TRUE(handled().empty()) << handled().front();
  EXPECT_EQ(refused().size(), framing_faults().size());
}

TEST_F(HttpTest, WhatIsFramedClearlyIsServed) {
  start({});
  const std::pair<std::string, const char*> requests[] = {
      {std::string(kPost) + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "POST /a 1"},
      {std::string(kPost) + "transfer-encoding: \t Chunked \r\n\r\n1;x=\"y\"\r\na\r\n00\r\nT: u\r\n\r\n", "POST /a 1"},
      {std::string(kPost) + "Transfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n", "POST /a 10"},
      {std::string(kPost) + "Content-Length: 002\r\n\r\nab", "POST /a 2"},
      {std::string(kPost) + "Content-Length: 0\r\n\r\n", "POST /a 0"},
      {"\r\n" + std::string(kPost) + "\r\n", "POST /a 0"},
      {std::string(kPost) + "Expect: 100-Continue\r\n\r\n", "POST /a 0"},
      {"GET /b HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", "GET /b 0"}};
  TestClient client(server_->port());
  for (const auto& [bytes, body] : requests) {
    client.send(bytes);
    EXPECT_EQ(client.read_reply().body, body) << bytes;
  }
}

TEST(HeadEnd, LooksAtEachByteOnce) {
  const std::string head = "GET / HTTP/1.1\r\nHost: x\r\n\r\nrest";
  for (size_t step = 1; step < head.size(); ++step) {
    HeadEnd end;
    size_t found = 0;
    for (size_t n = step; found == 0 && n < head.size() + step; n += step) found = end.find(head.substr(0, n));
    EXPECT_EQ(found, head.size() - 4) << step;
  }
}

BodyReader::Status read_in_pieces(BodyReader& reader, std::string_view bytes, size_t piece) {
  BodyReader::Status status = BodyReader::Status::kMore;
  while (!bytes.empty() && status == BodyReader::Status::kMore) {
    std::string_view part = bytes.substr(0, piece);
    const size_t size = part.size();
    status = reader.read(part);
    bytes.remove_prefix(size - part.size());
  }
  return status;
}

TEST(BodyReader, TakesPiecesOfAnySize) {
  const std::string_view bytes = "5;x\r\nhello\r\n11\r\n, world, and more\r\n0\r\nA: b\r\n\r\nnext";
  for (size_t piece = 1; piece <= bytes.size(); ++piece) {
    const auto budget = std::make_shared<BodyBudget>(1000);
    BodyReader reader(budget, std::nullopt, 100);
    EXPECT_EQ(read_in_pieces(reader, bytes, piece), BodyReader::Status::kDone);
    EXPECT_EQ(reader.take_body(), "hello, world, and more") << piece;
  }
}

TEST(BodyReader, MemoryComesWithTheBytesAndIsGivenBack) {
  const auto budget = std::make_shared<BodyBudget>(64u << 20);
  std::shared_ptr<void> share;
  {
    BodyReader reader(budget, 32u << 20, 32u << 20);
    std::string_view piece = "a";
    reader.read(piece);
    EXPECT_LE(budget->used(), 8u << 10) << "what was announced is not what has come";
    const std::string much(1 << 20, 'b');
    for (int i = 0; i < 3; ++i) {
      piece = much;
      reader.read(piece);
    }
    EXPECT_GE(budget->used(), 3u << 20);
    EXPECT_LE(budget->used(), 8u << 20);
    share = reader.take_share();
  }
  EXPECT_GE(budget->used(), 3u << 20) << "held with the request";
  share.reset();
  EXPECT_EQ(budget->used(), 0u);
}

TEST(BodyBudget, LargeBodiesLeaveAnEighthToSmallOnes) {
  BodyBudget budget(80u << 20);
  EXPECT_TRUE(budget.take(70u << 20, 70u << 20));
  EXPECT_FALSE(budget.take(1, 2u << 20));
  EXPECT_TRUE(budget.take(10u << 20, 1u << 20));
  EXPECT_FALSE(budget.take(1, 1));
  budget.give_back(1);
  EXPECT_TRUE(budget.take(1, 1));
}

}  // namespace
}  // namespace perigee
