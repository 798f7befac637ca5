// PdSimulation: clients, the router's real flow, and nodes that prefill and decode, in one World.
//
// One seed decides everything: the model, the nodes' sizes and layouts, the requests, the weather of the network, which
// processes stop or die and when, and what each clock says. A seed of four is quiet: nothing goes wrong, and then every
// request ends well, every import arrives and no lease runs out.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "router/forward.h"
#include "sim/pd/node.h"
#include "sim/pd/world.h"

namespace perigee::sim {

class Client;

class PdSimulation {
 public:
  PdSimulation(uint64_t seed, bool tracing);
  ~PdSimulation();
  // Ends the process when something is wrong. What happened, and how often.
  std::map<std::string, int64_t> run();
  uint64_t hash() const { return world_.hash(); }

 private:
  struct Faults {
    bool weather = false, leaves = false, cuts = false, lies = false, parts = false, stops = false, kills = false;
    bool quiet() const { return !weather && !leaves && !cuts && !lies && !parts && !stops && !kills; }
  };

  void draw_model();
  NodeSetup draw_node(int process, bool gives, bool takes);
  void start_node(int process);
  void ask_health();
  void begin_request();
  void disturb();
  void kill(int process);
  void end_node(int process);
  void reap(std::unique_ptr<Node> node, int process, const std::function<void()>& then);
  void take_counts(Node& node);
  bool all_rest() const;
  void check_last_request();
  std::shared_ptr<const std::vector<int32_t>> draw_prompt();

  World world_;
  Faults faults_;
  SchedulerConfig model_;  // what all nodes have in common
  int64_t state_units_ = 0;
  std::vector<NodeSetup> setups_;             // by process; 0 is the router's
  std::vector<std::unique_ptr<Node>> nodes_;  // by process
  std::shared_ptr<WorkerTable> table_;
  std::shared_ptr<ForwardShared> shared_;
  IdleSockets idle_;
  std::vector<std::shared_ptr<Client>> clients_;
  std::vector<std::shared_ptr<const std::vector<int32_t>>> prompts_;
  int32_t num_nodes_ = 0, num_to_begin_ = 0, num_dying_ = 0;
};

}  // namespace perigee::sim
