// What an engine has given to others of its cache and taken of theirs, since it was started: plain numbers.
#pragma once

#include <cstdint>

namespace perigee {

struct LeaseCounts {
  int64_t granted = 0, released = 0, expired = 0, refused_reads = 0, bytes = 0;
  int64_t withdrawn = 0;  // of those granted, see LeaseStage
  int64_t held = 0;       // now
};

// By their ends (TransferEnd).
struct TransferCounts {
  int64_t arrived = 0, failed = 0, withdrawn = 0, dropped = 0;
  int64_t bytes = 0;   // of all that arrived
  double seconds = 0;  // of all that arrived, together
  TransferCounts& operator+=(const TransferCounts& other) {
    arrived += other.arrived;
    failed += other.failed;
    withdrawn += other.withdrawn;
    dropped += other.dropped;
    bytes += other.bytes;
    seconds += other.seconds;
    return *this;
  }
};

struct HandoverCounts {
  LeaseCounts leases;        // given
  TransferCounts transfers;  // taken
  int64_t refused_connections = 0;
};

}  // namespace perigee
