// Client: one request to the router and what came of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/http_types.h"
#include "sim/chain_model.h"
#include "sim/pd/world.h"

namespace perigee::sim {

class Client final : public Exchange {
 public:
  Client(World& world, int number, Expected expected, bool tolerates)
      : world_(world), number_(number), expected_(std::move(expected)), tolerates_(tolerates) {}

  void respond(HttpReply reply) override;
  void begin_stream(HttpHeaders headers) override;
  void write(std::string data) override;
  void finish(bool close) override;
  void on_disconnect(std::function<void()> callback) override { callback_ = std::move(callback); }
  void post(std::function<void()> work) override { world_.after(0, std::move(work)); }

  void leave();
  bool ended() const { return ended_; }
  bool ended_well() const { return well_; }

 private:
  void take_ids(const std::vector<int32_t>& ids);
  void end_well(const std::string& finish);
  void end_badly(const std::string& why);
  void end();

  World& world_;
  const int number_;
  const Expected expected_;  // what the request gives on one node
  const bool tolerates_;     // an error may be its end
  std::function<void()> callback_;
  std::vector<int32_t> ids_;
  std::string text_, finish_;
  bool left_ = false, streams_ = false, ended_ = false, well_ = false;
};

}  // namespace perigee::sim
