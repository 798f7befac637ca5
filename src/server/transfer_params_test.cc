#include "server/transfer_params.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TransferParams read(const std::string& params, std::string* fault = nullptr) {
  const auto body = parse_json("{\"kv_transfer_params\":" + params + "}");
  CHECK(body.ok(), params);
  Fields fields(*body);
  TransferParams out;
  if (const Json* object = fields.object("kv_transfer_params")) out = read_transfer_params(*object, fields);
  if (fault != nullptr) *fault = fields.ok() ? "" : fields.status().error().message;
  return out;
}
std::string fault_of(const std::string& params) {
  std::string fault;
  read(params, &fault);
  return fault;
}

TEST(TransferParams, WhatAReplySaysComesBackTheSame) {
  for (const char* peer : {"10.1.50.70:5600", "node-3:65535", "[fe80::1]:5600"}) {
    const RemotePrefix lease{
        .peer = peer, .lease = {0xfedcba9876543210, 77}, .num_blocks = 40000, .tag = std::string(64, 'a')};
    const TransferParams again = read(dump_json(transfer_params_json(lease)));
    EXPECT_FALSE(again.leases());
    ASSERT_TRUE(again.remote.has_value()) << peer;
    EXPECT_EQ(*again.remote, lease);
  }
  EXPECT_EQ(transfer_params_json(RemotePrefix{.peer = "[fe80::1]:5600"}).find("remote_host")->as_string(), "fe80::1");
}

TEST(TransferParams, APromptWithoutALeaseIsComputedWhereItsReplyIs) {
  std::string fault;
  const TransferParams params = read(dump_json(transfer_params_json(std::nullopt)), &fault);
  EXPECT_EQ(fault, "");
  EXPECT_FALSE(params.leases());
  EXPECT_FALSE(params.remote.has_value());
}

TEST(TransferParams, WhatARouterAsksAPrefillServer) {
  const TransferParams params =
      read(R"({"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,)"
           R"("remote_host":null,"remote_port":null})");
  EXPECT_EQ(params.lease, LeaseWish::kAtEnd);
  EXPECT_FALSE(params.remote.has_value());
  EXPECT_EQ(fault_of("{}"), "");
  EXPECT_EQ(fault_of("null"), "");
}

TEST(TransferParams, FaultsNameTheMember) {
  EXPECT_NE(fault_of("[]").find("kv_transfer_params"), std::string::npos);
  EXPECT_NE(fault_of(R"({"do_remote_decode":true,"do_remote_prefill":true})").find("do_remote_decode"),
            std::string::npos);
  Json good =
      transfer_params_json(RemotePrefix{.peer = "h:1", .lease = {1, 2}, .num_blocks = 3, .tag = std::string(64, 'a')});
  ASSERT_EQ(fault_of(dump_json(good)), "");
  for (const auto& [name, values] : std::vector<std::pair<std::string, std::vector<Json>>>{
           {"remote_num_tokens", {Json(), Json(65), Json(-64), Json("64"), Json(int64_t{1} << 40)}},
           {"remote_host", {Json(), Json(""), Json(1), Json(std::string(256, 'h'))}},
           {"remote_port", {Json(), Json(0), Json(65536), Json("1")}},
           {"remote_engine_id", {Json(), Json(1), Json("1"), Json("000000000000000g"), Json("-000000000000001")}},
           {"remote_request_id", {Json(), Json(1), Json("1"), Json("00000000000000001")}},
           {"remote_tag", {Json(), Json(1), Json(std::string(65, 'a'))}}}) {
    for (const Json& value : values) {
      Json bad = good;
      bad.set(name, value);
      EXPECT_NE(fault_of(dump_json(bad)).find("kv_transfer_params." + name), std::string::npos)
          << name << " " << dump_json(value) << ": " << fault_of(dump_json(bad));
    }
  }
}

}  // namespace
}  // namespace perigee
