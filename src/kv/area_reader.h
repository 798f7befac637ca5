// AreaReader: takes units of another process of this host from memory that it shows (CUDA IPC). The leases' words stay
// on the connection; a slot is asked for while those before it are copied.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include "kv/framed_socket.h"
#include "kv/page_store.h"

namespace perigee {

// Of this boot of this machine; empty: unknown.
std::vector<uint8_t> host_id();

// Whether what another node says of its host is this one.
bool is_this_host(std::span<const uint8_t> asking_host);

// What maps them on this host.
std::vector<uint8_t> show_areas(const Areas& areas);

class AreaReader {
 public:
  // Of what show_areas() gave. kUnavailable: this node cannot map it.
  static Result<std::unique_ptr<AreaReader>> map(const PageStore& store, std::span<const uint8_t> shown);

  // Whether units of that group fit a slot.
  static bool fits(const PageStore& store, UnitGroup group) { return store.unit_bytes(group) <= kAreaSlotBytes; }

  // `number`: of the connection's newest request. After an error there may be replies that nobody has read: the
  // connection must end. All copies have ended when it returns.
  Status pull(const FramedSocket& frames, uint32_t& number, double silence_s, const LeaseName& lease, UnitRange units,
              const PageStore& store, const UnitPages& to, const std::stop_token& dropped) const;

 private:
  explicit AreaReader(Areas areas, size_t num_areas) : areas_(std::move(areas)), num_areas_(num_areas) {}

  const Areas areas_;
  const size_t num_areas_;  // of the node
};

}  // namespace perigee
