// The parts of App that app_requests.cc shares with app.cc: a request on its way through the pool.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "server/app.h"
#include "server/remote_lease.h"

namespace perigee {

// Shared by the executor, which notes a client that leaves, and the pool.
struct App::PendingRequest {
  PendingRequest(HttpRequest request_in, std::shared_ptr<LiveGenerations> live, double arrival)
      : request(std::move(request_in)), ticket(std::move(live)), arrival_s(arrival) {}
  HttpRequest request;
  const LiveGenerations::Ticket ticket;  // a drain waits for it
  const double arrival_s;
  std::atomic<bool> gone{false};
  RemoteLease lease;  // that its kv_transfer_params name
};

// A reply, or a generation.
struct App::Prepared {
  std::optional<HttpReply> reply;
  std::unique_ptr<GenerationSpec> generation;
  std::optional<OutputFormat> format;  // to be compiled into the generation's constraint
};

}  // namespace perigee
