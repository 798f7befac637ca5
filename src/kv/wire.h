// Wire: the frames between two nodes, as plain values and bytes. Fixed layouts, little endian, caps before allocations.
//
//   client                         server
//   Hello    nonce               >
//                                <  Welcome  nonce, tag       the tags show that both know the secret: HMAC-SHA-256
//   Proof    tag                 >                            over both nonces, under a name for each direction
//                                <  Ready    shape, incarnation
//   OpenLease, ExtendLease       >
//                                <  Held, Refused
//   ReadUnits, ReleaseLease      >
//                                <  a frame of raw bytes (ReadUnits), Done, Refused
//   AwaitGrowth                  >
//                                <  Grown, when a lease of the server has grown or ended, or after wait_ms
//   Carry                        >
//                                <  Carried, Refused      another way for bytes: memory that both processes map
//   StageUnits                   >
//                                <  Staged, Refused       the units lie in a slot of it now (shared_area.h)
//
// Each frame has the number of its request (1, 2, ... of a session), the incarnation that it is meant for, and a digest
// of header and payload, seeded by the session: a frame that was damaged, repeated, or meant for another life of the
// process is an error, and the connection ends. Frames are not encrypted: the digest protects against faults, not
// against who can change packets.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"
#include "kv/lease_table.h"

namespace perigee {

inline constexpr uint16_t kWireVersion = 5;
inline constexpr size_t kWireHeaderBytes = 32;
inline constexpr size_t kMaxHandshakeBytes = 4096;    // of a payload, before both sides are known
inline constexpr size_t kMaxRequestBytes = 16 << 20;  // of one with the tokens of a prompt: 4 M of them
inline constexpr size_t kMaxBlobBytes = 16 << 10;
inline constexpr size_t kMaxReadBytes = size_t{64} << 20;  // of units in one frame

using Nonce = std::array<uint8_t, 32>;
using Tag = std::array<uint8_t, 32>;

struct Hello {
  Nonce nonce{};
  bool operator==(const Hello&) const = default;
};
struct Welcome {
  Nonce nonce{};
  Tag tag{};
  bool operator==(const Welcome&) const = default;
};
struct Proof {
  Tag tag{};
  bool operator==(const Proof&) const = default;
};
struct Ready {
  CacheShape shape;
  uint64_t incarnation = 0;
  bool operator==(const Ready&) const = default;
};
struct OpenLease {
  LeaseName lease;
  int32_t num_blocks = 0;
  std::vector<int32_t> tokens;
  bool operator==(const OpenLease&) const = default;
};
struct ReadUnits {
  LeaseName lease;
  UnitRange units;
  bool operator==(const ReadUnits&) const = default;
};
struct ExtendLease {
  LeaseName lease;
  bool operator==(const ExtendLease&) const = default;
};
struct ReleaseLease {
  LeaseName lease;
  bool operator==(const ReleaseLease&) const = default;
};
struct Done {
  bool operator==(const Done&) const = default;
};
struct Refused {
  Code code = Code::kUnavailable;
  std::string why;
  bool operator==(const Refused&) const = default;
};
// Asks for another carrier of units, which stays as long as the connection. What a blob holds is the carrier's.
inline constexpr uint8_t kCarryUcx = 1, kCarryCudaIpc = 2;
struct Carry {
  uint8_t kind = 0;
  std::vector<uint8_t> blob;
  bool operator==(const Carry&) const = default;
};
struct Carried {
  std::vector<uint8_t> blob;
  bool operator==(const Carried&) const = default;
};
// A slot is written only when the reader asks for it, so it must have read what lay there.
struct StageUnits {
  LeaseName lease;
  UnitRange units;
  int32_t slot = 0;
  bool operator==(const StageUnits&) const = default;
};
using Staged = StagedUnits;
struct Held {
  LeaseHold hold;
  bool operator==(const Held&) const = default;
};
struct AwaitGrowth {
  uint64_t known = 0;
  uint32_t wait_ms = 0;  // the server waits no longer than kMaxGrowthWaitMs
  bool operator==(const AwaitGrowth&) const = default;
};
struct Grown {
  uint64_t count = 0;
  bool operator==(const Grown&) const = default;
};
using WireMessage = std::variant<Hello, Welcome, Proof, Ready, OpenLease, ReadUnits, ExtendLease, ReleaseLease, Done,
                                 Refused, Carry, Carried, StageUnits, Staged, Held, AwaitGrowth, Grown>;
inline constexpr uint32_t kMaxGrowthWaitMs = 10000;
inline constexpr uint16_t kRawBytes = 100;  // the type of a frame whose payload is units

struct WireHeader {
  uint16_t type = 0;  // WireMessage's index, or kRawBytes
  uint32_t payload_bytes = 0;
  uint32_t number = 0;       // of the request; its reply has the same
  uint64_t incarnation = 0;  // of the lease's owner; 0 before it is known
  uint64_t digest = 0;
};

// Appends header and payload.
void encode(const WireMessage& message, uint32_t number, uint64_t incarnation, uint64_t session,
            std::vector<uint8_t>& out);
// The header of a payload that lies elsewhere.
void encode_raw_header(std::span<const uint8_t> payload, uint32_t number, uint64_t incarnation, uint64_t session,
                       std::span<uint8_t, kWireHeaderBytes> out);

// kBadInput: not this protocol, another version, or a payload over max_bytes.
Result<WireHeader> decode_header(std::span<const uint8_t, kWireHeaderBytes> bytes, size_t max_bytes);
// kBadInput: the digest is of other bytes.
Status check_digest(const WireHeader& header, std::span<const uint8_t> payload, uint64_t session);
// kBadInput names the field.
Result<WireMessage> decode_payload(uint16_t type, std::span<const uint8_t> payload);

Nonce make_nonce();
// HMAC-SHA-256 under `use`, so that no tag serves for another purpose.
Tag tag_of(std::string_view secret, std::string_view use, std::span<const uint8_t> text);
Tag tag_of(std::string_view secret, std::string_view use, const Nonce& client, const Nonce& server);
bool same_tag(const Tag& a, const Tag& b);  // in constant time
uint64_t session_of(std::string_view secret, const Nonce& client, const Nonce& server);

}  // namespace perigee
