#include "router/http_response.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

struct Read {
  int status = 0;
  std::string body, fault;
  bool whole = false, keep_alive = false, to_end = false;
  std::string rest;  // past the reply
};

// Everything in pieces of `piece` bytes, and then the connection's end.
Read read_reply(std::string_view bytes, size_t piece) {
  ResponseParser parser;
  Read out;
  auto event = ResponseParser::Event::kMore;
  const auto take = [&](std::string_view& part) {
    std::string_view data;
    do {
      event = parser.next(part, data);
      if (event == ResponseParser::Event::kHead) out.status = parser.head().status;
      out.body.append(data);
    } while (event == ResponseParser::Event::kHead || event == ResponseParser::Event::kData);
  };
  while (!bytes.empty() && event == ResponseParser::Event::kMore) {
    std::string_view part = bytes.substr(0, piece);
    bytes.remove_prefix(part.size());
    take(part);
    out.rest = std::string(part) + std::string(bytes);
  }
  if (event == ResponseParser::Event::kMore) event = parser.end();
  out.whole = event == ResponseParser::Event::kWhole;
  out.fault = parser.fault();
  out.keep_alive = parser.head().keep_alive;
  out.to_end = parser.head().to_end;
  return out;
}

const std::string kOk = "HTTP/1.1 200 OK\r\n";

TEST(ResponseParser, ReadsEveryFramingInEveryPiece) {
  const std::string interim = "HTTP/1.1 100 Continue\r\n\r\n";
  struct Case {
    std::string bytes;
    bool keep_alive, to_end;
  };
  const std::vector<Case> cases = {
      {kOk + "Content-Length: 5\r\n\r\nhello", true, false},
      {interim + interim + kOk + "content-length: 005\r\n\r\nhello", true, false},
      {kOk + "Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=1\r\nllo\r\n0\r\nTrailer: x\r\n\r\n", true, false},
      {kOk + "Connection: close\r\nContent-Length: 5\r\n\r\nhello", false, false},
      {kOk + "Connection: x, Close\r\n\r\nhello", false, true},
      {"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", false, false},
      {"HTTP/1.1 200\r\n\r\nhello", false, true},
  };
  for (const Case& each : cases)
    for (const size_t piece : {1, 2, 3, 7, 1000}) {
      const Read read = read_reply(each.bytes, piece);
      EXPECT_EQ(read.status, 200) << each.bytes;
      EXPECT_EQ(read.body, "hello") << each.bytes;
      EXPECT_TRUE(read.whole) << each.bytes << read.fault;
      EXPECT_EQ(read.keep_alive, each.keep_alive) << each.bytes;
      EXPECT_EQ(read.to_end, each.to_end) << each.bytes;
    }
}

TEST(ResponseParser, RepliesWithoutABodyEndWithTheirHead) {
  for (const char* status : {"204 No Content", "304 Not Modified"}) {
    const Read read = read_reply(std::string("HTTP/1.1 ") + status + "\r\n\r\nHTTP/1.1", 3);
    EXPECT_TRUE(read.whole);
    EXPECT_EQ(read.rest, "HTTP/1.1");
  }
}

TEST(ResponseParser, AReplyThatBreaksOffIsNeverWhole) {
  const std::string length = kOk + "Content-Length: 5\r\n\r\nhell";
  const std::string chunks = kOk + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r";
  for (const std::string& bytes : {length, chunks, kOk + "Content-Length: 5\r\n", std::string(), std::string("HTTP")}) {
    for (size_t size = 0; size <= bytes.size(); ++size) {
      const Read read = read_reply(std::string_view(bytes).substr(0, size), 4);
      EXPECT_FALSE(read.whole) << bytes.substr(0, size);
      EXPECT_NE(read.fault, "");
    }
  }
}

TEST(ResponseParser, RefusesWhatTwoReadersCouldFrameDifferently) {
  const std::vector<std::string> cases = {
      kOk + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
      kOk + "Content-Length: 5, 5\r\n\r\nhello",
      kOk + "Content-Length: +5\r\n\r\nhello",
      kOk + "Content-Length: 9999999999999999\r\n\r\n",
      kOk + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      kOk + "Transfer-Encoding: gzip\r\n\r\nhello",
      kOk + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      kOk + "Transfer-Encoding: chunked\r\n\r\nx\r\n",
      kOk + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
      kOk + "A: b\r\n folded\r\n\r\n",
      kOk + "A : b\r\n\r\n",
      kOk + "A: b\nC: d\r\n\r\n",
      "HTTP/1.1 099 x\r\n\r\n",
      "HTTP/1.1 20 x\r\n\r\n",
      "HTTP/2.0 200 x\r\n\r\n",
      "HTTP/1.1 2000\r\n\r\n",
      "HTTP/1.1 101 Switching\r\n\r\n",
  };
  for (const std::string& bytes : cases)
    for (const size_t piece : {1, 1000}) {
      const Read read = read_reply(bytes, piece);
      EXPECT_FALSE(read.whole) << bytes;
      EXPECT_NE(read.fault, "") << bytes;
    }
}

TEST(ResponseParser, CapsWhatHasNoEnd) {
  ResponseParser parser;
  const std::string endless(1000, 'x');
  std::string_view data;
  auto event = ResponseParser::Event::kMore;
  for (int i = 0; i < 100 && event == ResponseParser::Event::kMore; ++i) {
    std::string_view bytes = endless;
    event = parser.next(bytes, data);
  }
  EXPECT_EQ(event, ResponseParser::Event::kFault);
  std::string interim;
  for (int i = 0; i < 100; ++i) interim += "HTTP/1.1 100 Continue\r\n\r\n";
  EXPECT_NE(read_reply(interim, 1000).fault, "");
}

}  // namespace
}  // namespace perigee
