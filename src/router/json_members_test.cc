#include "router/json_members.h"

#include <gtest/gtest.h>

#include "router/forward.h"

namespace perigee {
namespace {

TEST(JsonMembers, FindsMembersAsTheyAreWritten) {
  const std::string text =
      R"( { "a" : 12345678901234567890 , "b":"x\"},{\\", "c" : [1,{"a":2}, "]"] ,"d":{"stream":true},"e":true} )";
  const auto members = JsonMembers::read(text);
  ASSERT_TRUE(members);
  EXPECT_EQ(members->find("a")->value, "12345678901234567890");
  EXPECT_EQ(members->find("b")->value, R"("x\"},{\\")");
  EXPECT_EQ(members->find("c")->value, R"([1,{"a":2}, "]"])");
  EXPECT_EQ(members->find("stream"), nullptr);
  EXPECT_EQ(members->find("e")->value, "true");
  EXPECT_EQ(members->rewritten({"b", "c", "d"}, R"("n":1)"), R"({"a":12345678901234567890,"e":true,"n":1})");
  EXPECT_EQ(JsonMembers::read("{}")->rewritten({}, ""), "{}");
  EXPECT_EQ(JsonMembers::read("{}")->rewritten({}, R"("a":1)"), R"({"a":1})");
}

TEST(JsonMembers, RefusesWhatIsNoObjectOrHasNoEnd) {
  const std::string whole = R"({"a":[1,{"b":"c\\"}],"d":2})";
  ASSERT_TRUE(JsonMembers::read(whole));
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_FALSE(JsonMembers::read(whole.substr(0, size))) << size;
  for (const char* text : {"[]", "1", "{} {}", R"({"a":1,})", R"({"a"})", R"({"a":})", R"({a:1})", R"({"a":1]})"})
    EXPECT_FALSE(JsonMembers::read(text)) << text;
  std::string many = "{";
  for (int i = 0; i < 300; ++i) many += "\"a\":1,";
  EXPECT_FALSE(JsonMembers::read(many + "\"b\":1}"));
}

TEST(PdBodies, PrefillIsAskedForOneTokenAndItsTransfer) {
  const auto body = prefill_body(
      R"({"model":"m","messages":[{"content":"max_tokens"}],"max_tokens":50,"stream":true,"stream_options":{},)"
      R"("min_tokens":3,"n":4,"seed":7,"kv_transfer_params":{"remote_host":"evil"}})");
  ASSERT_TRUE(body);
  EXPECT_EQ(
      *body,
      R"({"model":"m","messages":[{"content":"max_tokens"}],"seed":7,"stream":false,"max_tokens":1,)"
      R"("kv_transfer_params":{"do_remote_decode":true,"announce_early":true,"do_remote_prefill":false,"remote_engine_id":null,)"
      R"("remote_block_ids":null,"remote_host":null,"remote_port":null}})");
  EXPECT_TRUE(prefill_body(R"({"max_completion_tokens":9})")->ends_with(R"(,"max_completion_tokens":1})"));
  EXPECT_FALSE(prefill_body("not an object"));
}

TEST(PdBodies, DecodeGetsTheClientsBodyAndTheTransfer) {
  const std::string body = R"({"prompt":"p","n":2,"kv_transfer_params":{"remote_host":"evil"}})";
  EXPECT_EQ(*decode_body(body, R"({"id":"x","kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5}})"),
            R"({"prompt":"p","n":2,"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5}})");
  EXPECT_FALSE(decode_body(body, R"({"id":"x"})"));
  EXPECT_FALSE(decode_body(body, R"({"kv_transfer_params":null})"));
  EXPECT_FALSE(decode_body(body, "data: {}"));
}

TEST(WorkerHead, CarriesTheClientsHeadersLessThoseOfItsConnection) {
  HttpRequest request;
  request.method = "POST";
  request.path = "/v1/completions";
  request.query = "a=b";
  request.headers = {{"Host", "router"},
                     {"Authorization", "Bearer k"},
                     {"Connection", "keep-alive, X-Mine"},
                     {"X-Mine", "1"},
                     {"Content-Length", "99"},
                     {"Transfer-Encoding", "chunked"},
                     {"Content-Type", "a/json"},
                     {"Expect", "100-continue"},
                     {"X-Request-Id", "bad id"},
                     {"X-Other", "2"}};
  const WorkerUrl url = *parse_worker_url("http://w:81/base/");
  EXPECT_EQ(worker_head(request, url, 5, "id-1"),
            "POST /base/v1/completions?a=b HTTP/1.1\r\nHost: w:81\r\nX-Request-Id: id-1\r\nAuthorization: Bearer k\r\n"
            "Content-Type: a/json\r\nX-Other: 2\r\nContent-Length: 5\r\n\r\n");
}

}  // namespace
}  // namespace perigee
