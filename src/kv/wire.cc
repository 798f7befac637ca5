#include "kv/wire.h"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

namespace perigee {
namespace {

constexpr uint32_t kMagic = 0x564b4750;  // "PGKV"
constexpr size_t kMaxTextBytes = 512;
constexpr size_t kDigestAt = kWireHeaderBytes - sizeof(uint64_t);

template <typename T>
void put(uint8_t* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
}
template <typename T>
T get(const uint8_t* from) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return static_cast<T>(value);
}

// Writer and Reader offer the same words, so that one function for each message serves both directions.
class Writer {
 public:
  explicit Writer(std::vector<uint8_t>& out) : out_(out) {}
  template <typename T>
  void number(const char*, const T& value) {
    out_.resize(out_.size() + sizeof(T));
    put(out_.data() + out_.size() - sizeof(T), value);
  }
  void truth(const char* field, const bool& value) { number(field, static_cast<uint8_t>(value)); }
  void bytes(const char*, const std::array<uint8_t, 32>& value) { out_.insert(out_.end(), value.begin(), value.end()); }
  void text(const char* field, const std::string& value) {
    const size_t size = std::min(value.size(), kMaxTextBytes);
    number(field, static_cast<uint16_t>(size));
    out_.insert(out_.end(), value.begin(), value.begin() + static_cast<std::ptrdiff_t>(size));
  }
  template <typename T>
  void list(const char* field, const std::vector<T>& value) {
    number(field, static_cast<uint32_t>(value.size()));
    static_assert(std::endian::native == std::endian::little);
    const auto* first = reinterpret_cast<const uint8_t*>(value.data());
    out_.insert(out_.end(), first, first + value.size() * sizeof(T));
  }
  template <typename E>
  void choice(const char* field, const E& value, int /*count*/) {
    number(field, static_cast<uint8_t>(value));
  }

 private:
  std::vector<uint8_t>& out_;
};

// The first bad field ends it.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  template <typename T>
  void number(const char* field, T& value) {
    if (bytes_.size() < sizeof(T)) return fail(field, "the frame ends here");
    value = get<T>(bytes_.data());
    bytes_ = bytes_.subspan(sizeof(T));
  }
  void truth(const char* field, bool& value) {
    uint8_t byte = 0;
    number(field, byte);
    if (byte > 1) fail(field, "no truth value");
    value = byte == 1;
  }
  void bytes(const char* field, std::array<uint8_t, 32>& value) {
    if (bytes_.size() < value.size()) return fail(field, "the frame ends here");
    std::memcpy(value.data(), bytes_.data(), value.size());
    bytes_ = bytes_.subspan(value.size());
  }
  void text(const char* field, std::string& value) {
    uint16_t size = 0;
    number(field, size);
    if (size > kMaxTextBytes || size > bytes_.size()) return fail(field, "too long");
    value.assign(bytes_.begin(), bytes_.begin() + size);
    bytes_ = bytes_.subspan(size);
  }
  template <typename T>
  void list(const char* field, std::vector<T>& value) {
    uint32_t count = 0;
    number(field, count);
    if (count > bytes_.size() / sizeof(T)) return fail(field, "more elements than bytes");
    value.resize(count);
    if (count > 0) std::memcpy(value.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
  }
  template <typename E>
  void choice(const char* field, E& value, int count) {
    uint8_t byte = 0;
    number(field, byte);
    if (byte >= count) return fail(field, "out of range");
    value = static_cast<E>(byte);
  }
  Status status() const {
    if (!field_.empty()) return bad_input(fmt::format("a frame with a bad {}: {}", field_, why_), field_);
    if (!bytes_.empty()) return bad_input(fmt::format("a frame with {} bytes too many", bytes_.size()), "frame");
    return {};
  }

 private:
  void fail(const char* field, const char* why) {
    bytes_ = {};
    if (!field_.empty()) return;
    field_ = field;
    why_ = why;
  }
  std::span<const uint8_t> bytes_;
  std::string field_, why_;
};

template <typename Io, typename T>
void code(Io& io, T& m) {
  using M = std::remove_const_t<T>;
  const auto lease = [&](auto& name) {
    io.number("incarnation", name.incarnation);
    io.number("lease", name.number);
  };
  const auto range = [&](auto& units) {
    io.choice("group", units.group, kNumUnitGroups);
    io.number("first", units.first);
    io.number("count", units.count);
  };
  if constexpr (std::is_same_v<M, Hello>) {
    io.bytes("nonce", m.nonce);
  } else if constexpr (std::is_same_v<M, Welcome>) {
    io.bytes("nonce", m.nonce);
    io.bytes("tag", m.tag);
  } else if constexpr (std::is_same_v<M, Proof>) {
    io.bytes("tag", m.tag);
  } else if constexpr (std::is_same_v<M, Ready>) {
    io.text("model", m.shape.model);
    io.text("numbers", m.shape.numbers);
    io.number("block_bytes", m.shape.block_bytes);
    io.number("state_layers", m.shape.state_layers);
    io.number("state_heads", m.shape.state_heads);
    io.number("state_unit_bytes", m.shape.state_unit_bytes);
    io.text("draft", m.shape.draft);
    io.text("draft_numbers", m.shape.draft_numbers);
    io.number("draft_parts", m.shape.draft_parts);
    io.number("draft_unit_bytes", m.shape.draft_unit_bytes);
    io.truth("deterministic", m.shape.deterministic);
    io.number("lease_ms", m.shape.lease_ms);
    io.number("incarnation", m.incarnation);
  } else if constexpr (std::is_same_v<M, OpenLease>) {
    lease(m.lease);
    io.number("num_blocks", m.num_blocks);
    io.list("tokens", m.tokens);
  } else if constexpr (std::is_same_v<M, ReadUnits>) {
    lease(m.lease);
    range(m.units);
  } else if constexpr (std::is_same_v<M, Carry>) {
    io.number("kind", m.kind);
    io.list("blob", m.blob);
  } else if constexpr (std::is_same_v<M, Carried>) {
    io.list("blob", m.blob);
  } else if constexpr (std::is_same_v<M, StageUnits>) {
    lease(m.lease);
    range(m.units);
    io.number("slot", m.slot);
  } else if constexpr (std::is_same_v<M, Staged>) {
    io.list("digests", m.digests);
    io.list("ranks", m.ranks);
  } else if constexpr (std::is_same_v<M, ExtendLease> || std::is_same_v<M, ReleaseLease>) {
    lease(m.lease);
  } else if constexpr (std::is_same_v<M, Held>) {
    io.number("num_blocks", m.hold.num_blocks);
    io.choice("stage", m.hold.stage, static_cast<int>(LeaseStage::kFailed));  // which no reply names
    io.number("num_tokens", m.hold.num_tokens);
    io.truth("has_checkpoint", m.hold.has_checkpoint);
  } else if constexpr (std::is_same_v<M, AwaitGrowth>) {
    io.number("known", m.known);
    io.number("wait_ms", m.wait_ms);
  } else if constexpr (std::is_same_v<M, Grown>) {
    io.number("count", m.count);
  } else if constexpr (std::is_same_v<M, Refused>) {
    io.choice("code", m.code, static_cast<int>(Code::kDeviceLost) + 1);
    io.text("why", m.why);
  }
}

void put_header(uint16_t type, std::span<const uint8_t> payload, uint32_t number, uint64_t incarnation,
                uint64_t session, uint8_t* out) {
  put(out, kMagic);
  put(out + 4, kWireVersion);
  put(out + 6, type);
  put(out + 8, static_cast<uint32_t>(payload.size()));
  put(out + 12, number);
  put(out + 16, incarnation);
  const uint64_t of_header = XXH3_64bits_withSeed(out, kDigestAt, session);
  put(out + kDigestAt, XXH3_64bits_withSeed(payload.data(), payload.size(), of_header));
}

template <size_t I = 0>
WireMessage message_of(uint16_t type) {
  if constexpr (I + 1 < std::variant_size_v<WireMessage>)
    if (type != I) return message_of<I + 1>(type);
  return WireMessage(std::in_place_index<I>);
}

}  // namespace

void encode(const WireMessage& message, uint32_t number, uint64_t incarnation, uint64_t session,
            std::vector<uint8_t>& out) {
  const size_t begin = out.size();
  out.resize(begin + kWireHeaderBytes);
  Writer writer(out);
  std::visit([&](const auto& m) { code(writer, m); }, message);
  const std::span<const uint8_t> payload = std::span(out).subspan(begin + kWireHeaderBytes);
  put_header(static_cast<uint16_t>(message.index()), payload, number, incarnation, session, out.data() + begin);
}

void encode_raw_header(std::span<const uint8_t> payload, uint32_t number, uint64_t incarnation, uint64_t session,
                       std::span<uint8_t, kWireHeaderBytes> out) {
  put_header(kRawBytes, payload, number, incarnation, session, out.data());
}

Result<WireHeader> decode_header(std::span<const uint8_t, kWireHeaderBytes> bytes, size_t max_bytes) {
  if (get<uint32_t>(bytes.data()) != kMagic) return bad_input("the peer speaks another protocol", "magic");
  if (const auto version = get<uint16_t>(bytes.data() + 4); version != kWireVersion)
    return bad_input(fmt::format("the peer speaks version {}, this is version {}", version, kWireVersion), "version");
  const WireHeader header{.type = get<uint16_t>(bytes.data() + 6),
                          .payload_bytes = get<uint32_t>(bytes.data() + 8),
                          .number = get<uint32_t>(bytes.data() + 12),
                          .incarnation = get<uint64_t>(bytes.data() + 16),
                          .digest = get<uint64_t>(bytes.data() + kDigestAt)};
  if (header.type != kRawBytes && header.type >= std::variant_size_v<WireMessage>)
    return bad_input(fmt::format("a frame of unknown type {}", header.type), "type");
  if (header.payload_bytes > max_bytes)
    return bad_input(fmt::format("a frame of {} bytes, {} at most", header.payload_bytes, max_bytes), "payload_bytes");
  return header;
}

Status check_digest(const WireHeader& header, std::span<const uint8_t> payload, uint64_t session) {
  std::array<uint8_t, kWireHeaderBytes> again;
  put_header(header.type, payload, header.number, header.incarnation, session, again.data());
  if (get<uint64_t>(again.data() + kDigestAt) != header.digest)
    return bad_input("a frame whose digest is of other bytes: it was damaged, or is of another session", "digest");
  return {};
}

Result<WireMessage> decode_payload(uint16_t type, std::span<const uint8_t> payload) {
  if (type >= std::variant_size_v<WireMessage>) return bad_input("a frame that is no message", "type");
  WireMessage message = message_of(type);
  Reader reader(payload);
  std::visit([&](auto& m) { code(reader, m); }, message);
  RETURN_IF_ERROR(reader.status());
  if (const auto* held = std::get_if<Held>(&message)) {
    if (held->hold.num_blocks < 0) return bad_input("a lease of fewer than no blocks", "num_blocks");
    if (held->hold.num_tokens < 0) return bad_input("a lease of fewer than no tokens", "num_tokens");
  }
  return message;
}

Nonce make_nonce() {
  Nonce nonce;
  CHECK(RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1, "the system gives no random bytes");
  return nonce;
}

Tag tag_of(std::string_view secret, std::string_view use, std::span<const uint8_t> text) {
  std::vector<uint8_t> all(use.begin(), use.end());
  all.push_back(0);
  all.insert(all.end(), text.begin(), text.end());
  Tag tag;
  unsigned int size = 0;
  CHECK(HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), all.data(), all.size(), tag.data(), &size) !=
            nullptr &&
        size == tag.size());
  return tag;
}

Tag tag_of(std::string_view secret, std::string_view use, const Nonce& client, const Nonce& server) {
  std::array<uint8_t, sizeof(Nonce) * 2> both;
  std::copy(server.begin(), server.end(), std::copy(client.begin(), client.end(), both.begin()));
  return tag_of(secret, use, both);
}

bool same_tag(const Tag& a, const Tag& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

uint64_t session_of(std::string_view secret, const Nonce& client, const Nonce& server) {
  return get<uint64_t>(tag_of(secret, "session", client, server).data());
}

}  // namespace perigee
