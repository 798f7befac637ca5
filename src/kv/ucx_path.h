// UcxPath: bytes of one connection over UCX (libucp), which takes shared memory, InfiniBand or whatever else its own
// variables (UCX_TLS, UCX_NET_DEVICES) allow. Frames, handshake and digests stay on the connection: this carries
// payloads whose size both sides know, one at a time, and what arrives is believed only once its digest fits.
//
// libucp is loaded at run time; a machine without it, or a build without its headers (libucx-dev), refuses the carrier.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"

namespace perigee {

class UcxPath {
 public:
  // kUnavailable says what is missing. The first call loads the library and may change the environment: before threads.
  static Status check();
  static Result<std::unique_ptr<UcxPath>> create();
  ~UcxPath();
  UcxPath(const UcxPath&) = delete;
  UcxPath& operator=(const UcxPath&) = delete;

  // What the other side's connect() needs, and the same of it. Only from a peer that has shown that it knows the
  // secret.
  const std::vector<uint8_t>& address() const;
  Status connect(std::span<const uint8_t> address);

  // The other side must receive() the same number of bytes. They end at timeout_s, or with `is_over`, which is asked
  // every few milliseconds; after an error nothing of `bytes` is touched any more, and the path is good for nothing.
  using IsOver = std::function<bool()>;
  Status send(std::span<const uint8_t> bytes, double timeout_s, const IsOver& is_over);
  Status receive(std::span<uint8_t> bytes, double timeout_s, const IsOver& is_over);

 private:
  struct Impl;
  explicit UcxPath(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee
