#include "main/kv_transfer_flags.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/temp_folder.h"
#include "kv/ucx_path.h"

namespace perigee {
namespace {

constexpr const char* kProducer = R"({"kv_connector":"NixlConnector","kv_role":"kv_producer"})";
constexpr const char* kConsumer = R"({"kv_connector":"NixlConnector","kv_role":"kv_consumer"})";

class KvTransferFlag : public testing::Test {
 protected:
  Result<HandoverConfig> parsed(const std::vector<std::string>& words) {
    KvTransferFlags read;
    CommandLine flags("perigee serve", "");
    add_kv_transfer_flags(flags, read);
    RETURN_IF_ERROR(flags.parse(words));
    HandoverConfig config;
    RETURN_IF_ERROR(settle_kv_transfer(flags, variables, read, config));
    return config;
  }
  Result<HandoverConfig> of_json(const std::string& json) { return parsed({"--kv-transfer-config", json}); }
  std::string fault(const std::vector<std::string>& words) {
    const auto config = parsed(words);
    return config.ok() ? "" : config.error().message;
  }

  TempFolder folder;
  const std::string path = folder.path();
  KvTransferVariables variables{.runtime_folder = path.c_str()};
};

TEST_F(KvTransferFlag, RolesAndVllmsDefaults) {
  EXPECT_FALSE(parsed({})->any());
  const auto producer = of_json(kProducer);
  ASSERT_TRUE(producer.ok()) << producer.error().message;
  EXPECT_TRUE(producer->gives && !producer->connect);
  EXPECT_EQ(producer->listens->host, "127.0.0.1");
  EXPECT_EQ(producer->listens->port, 5600);
  EXPECT_EQ(producer->lease_s, 30);
  const auto consumer = of_json(kConsumer);
  EXPECT_TRUE(!consumer->gives && consumer->connect && !consumer->listens);
  EXPECT_EQ(consumer->on_failure, ImportEnd::kFail);
  const auto both = of_json(R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu",)"
                            R"("engine_id":"x","kv_load_failure_policy":"recompute",)"
                            R"("kv_connector_extra_config":{"kv_lease_duration":12,"backends":["TCP","UCX"]}})");
  ASSERT_TRUE(both.ok()) << both.error().message;
  EXPECT_TRUE(both->gives && both->connect);
  EXPECT_EQ(both->on_failure, ImportEnd::kRecompute);
  EXPECT_EQ(both->lease_s, 12);
  EXPECT_EQ(both->backends, (std::vector<std::string>{"TCP", "UCX"}));
  EXPECT_FALSE(both->prefers_ucx() || consumer->prefers_ucx());
  EXPECT_TRUE(consumer->backends.empty());
}

TEST_F(KvTransferFlag, FlagsComeBeforeTheJsonAndVariables) {
  variables.host = "localhost";
  variables.port = "5660";
  EXPECT_EQ(of_json(kProducer)->listens->port, 5660);
  EXPECT_EQ(of_json(kProducer)->listens->host, "localhost");
  const auto config =
      parsed({"--kv-transfer-config", kProducer, "--kv-side-channel-port", "0", "--kv-side-channel-host", "127.0.0.2",
              "--kv-load-failure-policy", "recompute", "--kv-peers", "a:1", "b:2"});
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->listens->port, 0);
  EXPECT_EQ(config->listens->host, "127.0.0.2");
  EXPECT_EQ(config->on_failure, ImportEnd::kRecompute);
  EXPECT_EQ(config->peers, (std::vector<std::string>{"a:1", "b:2"}));
  variables.port = "many";
  EXPECT_NE(fault({"--kv-transfer-config", kProducer}).find("VLLM_NIXL_SIDE_CHANNEL_PORT"), std::string::npos);
}

// As vLLM's default is written out: it is refused where it cannot be had, and not replaced.
TEST_F(KvTransferFlag, UcxIsTakenWhereItIsNamedFirst) {
  const auto config = of_json(R"({"kv_connector":"NixlConnector","kv_role":"kv_both",)"
                              R"("kv_connector_extra_config":{"backends":["UCX"]}})");
  EXPECT_EQ(config.ok(), UcxPath::check().ok());
  const std::string why = config.ok() ? "UCX" : config.error().message;
  EXPECT_NE(why.find("UCX"), std::string::npos);
  EXPECT_TRUE(!config.ok() || config->prefers_ucx());
}

TEST_F(KvTransferFlag, ErrorsNameTheKey) {
  for (
      const auto& [json, key] : std::vector<std::pair<std::string, std::string>>{
          {"{}", "kv_connector"},
          {"[]", "must be a JSON object"},
          {"{", "--kv-transfer-config"},
          {R"({"kv_connector":"MooncakeConnector","kv_role":"kv_both"})", "kv_connector"},
          {R"({"kv_connector":"NixlConnector"})", "kv_role"},
          {R"({"kv_connector":"NixlConnector","kv_role":"both"})", "kv_role"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_rolle":1})", "kv_rolle"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"retry"})",
           "kv_load_failure_policy"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":{"kv_lease_duration":0}})",
           "kv_lease_duration"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":{"backends":["LIBFABRIC"]}})",
           "backends"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":{"backends":[1]}})",
           "backends"},
          {R"({"kv_connector":"NixlConnector","kv_role":"kv_both",)"
           R"("kv_connector_extra_config":{"bidirectional_kv_xfer":true}})",
           "bidirectional_kv_xfer"}}) {
    const std::string message = fault({"--kv-transfer-config", json});
    EXPECT_NE(message.find("--kv-transfer-config"), std::string::npos) << json << ": " << message;
    EXPECT_NE(message.find(key), std::string::npos) << json << ": " << message;
  }
}

TEST_F(KvTransferFlag, BeyondThisMachineASecretIsNeeded) {
  const auto at = [&](const std::string& host, std::vector<std::string> more) {
    more.insert(more.end(), {"--kv-transfer-config", kProducer, "--kv-side-channel-host", host});
    return more;
  };
  EXPECT_NE(fault(at("10.1.50.70", {})).find("--kv-secret-file"), std::string::npos);
  EXPECT_NE(fault(at("0.0.0.0", {"--kv-secret", "0123456789abcdef"})).find("--kv-side-channel-host"),
            std::string::npos);
  EXPECT_EQ(fault(at("10.1.50.70", {"--kv-secret", "0123456789abcdef"})), "");
  EXPECT_NE(fault(at("10.1.50.70", {"--kv-secret", "short"})).find("16"), std::string::npos);
  const std::string file = path + "/secret";
  std::ofstream(file) << "0123456789abcdef0\n";
  EXPECT_EQ(parsed(at("10.1.50.70", {"--kv-secret-file", file}))->secret, "0123456789abcdef0");
  const std::string unreadable = fault(at("10.1.50.70", {"--kv-secret-file", path + "/none"}));
  EXPECT_NE(unreadable.find("--kv-secret-file " + path + "/none"), std::string::npos) << unreadable;
  EXPECT_NE(
      fault(at("10.1.50.70", {"--kv-secret-file", file, "--kv-secret", "0123456789abcdef"})).find("one of the two"),
      std::string::npos);
}

// Else every request would be refused, one by one.
TEST_F(KvTransferFlag, PeersAreAddresses) {
  for (const char* wrong : {"10.0.0.1", "a:", ":1", "a:b", "a:0", "http://a"})
    EXPECT_NE(fault({"--kv-transfer-config", kConsumer, "--kv-peers", "a:1", wrong}).find(wrong), std::string::npos);
  EXPECT_EQ(fault({"--kv-transfer-config", kConsumer, "--kv-peers", "a:1", "[::1]:5600"}), "");
}

TEST_F(KvTransferFlag, ASecretIsNotShown) {
  KvTransferFlags read;
  CommandLine flags("perigee serve", "");
  add_kv_transfer_flags(flags, read);
  ASSERT_TRUE(flags.parse({"--kv-secret", "0123456789abcdef", "--kv-peers", "a:1"}).ok());
  for (const std::string& shown : {flags.resolved(), flags.resolved_given()}) {
    EXPECT_EQ(shown.find("0123456789abcdef"), std::string::npos) << shown;
    EXPECT_NE(shown.find("kv-peers: a:1"), std::string::npos) << shown;
  }
}

TEST_F(KvTransferFlag, APlanNeedsNoSecretAndReadsNone) {
  const auto planned = [](const std::vector<std::string>& words) -> Result<HandoverConfig> {
    KvTransferFlags read;
    CommandLine flags("perigee plan", "");
    add_kv_transfer_flags(flags, read);
    RETURN_IF_ERROR(flags.parse(words));
    HandoverConfig config;
    RETURN_IF_ERROR(plan_kv_transfer(flags, read, config));
    return config;
  };
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {}, {"--kv-secret-file", path + "/none"}, {"--kv-side-channel-host", "10.1.50.70"}})
    for (const char* role : {kProducer, kConsumer}) {
      std::vector<std::string> words = {"--kv-transfer-config", role};
      words.insert(words.end(), more.begin(), more.end());
      const auto config = planned(words);
      ASSERT_TRUE(config.ok()) << config.error().message;
      EXPECT_TRUE(config->any() && config->secret.empty());
      EXPECT_EQ(config->gives, role == kProducer);
    }
  EXPECT_FALSE(planned({"--kv-transfer-config", "{}"}).ok());
  EXPECT_FALSE(planned({})->any());
}

TEST_F(KvTransferFlag, ProcessesOfAUserShareASecretThatOthersCannotRead) {
  const auto first = of_json(kProducer), second = of_json(kConsumer);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->secret.size(), 64u);
  EXPECT_EQ(first->secret, second->secret);
  struct stat found {};
  ASSERT_EQ(stat((path + "/perigee-kv-secret").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777u, 0600u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path), {}), 1) << "no draft is left";
  ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  EXPECT_NE(fault({"--kv-transfer-config", kProducer}).find("user alone"), std::string::npos);
}

}  // namespace
}  // namespace perigee
