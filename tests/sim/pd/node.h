// Node: one engine of the simulation: the real scheduler, Handovers, LeaseTable, Transfer and lease server of one life
// of one process, with fake workers for the hands. What src/engine does on its thread is done in tick(), in the same
// order.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "engine/handovers.h"
#include "sim/harness.h"
#include "sim/pd/http.h"

namespace perigee::sim {

struct NodeSetup {
  int process = 0;
  SchedulerConfig config;
  int64_t state_units = 0;  // of the model; 0: attention alone
  HandoverConfig handover;
  std::string model = "chain";
  int32_t queue_length = 64;
  double lie_chance = 0;  // of a reply's word about its lease
  bool announces = true;  // leases that grow; false: as a server that knows nothing of them
};

class Node final : public Harness {
 public:
  Node(World& world, const NodeSetup& setup);
  // Ends fibers, so on one of them.
  ~Node() override;

  void take(const std::shared_ptr<HttpCall>& call);  // a request
  bool busy() const { return !mailbox_.empty() || !scheduler_.idle(); }
  void drop_prefix_cache() { scheduler_.drop_prefix_cache(); }
  // The process has died: nothing leaves it any more. Whoever waits for it hears of it or not.
  void die(bool heard);
  // Nothing runs, waits, is lent or is filled any more, and all that was is free.
  void check_rest();
  bool rests() const { return !busy() && imports_.empty() && leases_.empty(); }
  void stop_serving();  // as at the end of a process: its destructor closes what it lends and takes
  void check_touch(const void* page) const;

  int64_t num_imports() const { return scheduler_.gauges().imports; }
  SchedulerGauges gauges() const { return scheduler_.gauges(); }
  HandoverCounts handover_counts() const { return handovers_->counts(); }
  const Counts& harness_counts() const { return counts_; }

 private:
  struct Start {
    std::shared_ptr<HttpCall> call;
    EngineRequest request;
    double arrival_s = 0;
  };
  struct Stop {
    std::shared_ptr<HttpCall> call;
  };
  using Message = std::variant<Start, Stop, LeaseOver, ImportOver>;
  struct Open {  // a request that runs
    std::shared_ptr<HttpCall> call;
    bool lease = false, streams = false, begun = false, announced = false;
    bool imports = false;
    std::vector<int32_t> ids;
  };

  void run();
  void tick();
  void post(Message message) { mailbox_.push_back(std::move(message)); }
  void handle(Start& start);
  void handle(const Stop& stop);
  void handle(const LeaseOver& over);
  void handle(const ImportOver& over);
  void see_update(const SequenceUpdate& update) override { updates_.push_back(update); }
  void deliver_growth(const LeaseGrowth& growth);
  void deliver_update(const SequenceUpdate& update);
  void refuse(HttpCall& call, int status, const std::string& why) const;
  std::string transfer_params(const std::optional<RemotePrefix>& lease);

  World& world_;
  const NodeSetup setup_;
  PageStore store_;
  CacheShape shape_;
  std::unique_ptr<Handovers> handovers_;
  std::deque<Message> mailbox_;
  std::vector<SequenceUpdate> updates_;
  std::map<SequenceId, Open> open_;
  std::map<const HttpCall*, SequenceId> sequences_;
  std::map<SequenceId, double> import_begun_s_;
  Thread engine_;
  bool stopping_ = false;
};

}  // namespace perigee::sim
