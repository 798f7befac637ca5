// RemoteLease: what another server holds for a request, until the engine has it. A request that ends before then lets
// it go, whatever ended it, so that the other server's pages are free at once.
#pragma once

#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "server/backend.h"

namespace perigee {

class RemoteLease {
 public:
  RemoteLease() = default;
  RemoteLease(std::shared_ptr<Backend> backend, RemotePrefix remote)
      : backend_(std::move(backend)), remote_(std::move(remote)) {}
  RemoteLease(RemoteLease&& other) noexcept
      : backend_(std::move(other.backend_)), remote_(std::exchange(other.remote_, std::nullopt)) {}
  RemoteLease& operator=(RemoteLease&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(remote_, other.remote_);
    return *this;
  }
  ~RemoteLease() {
    if (!remote_) return;
    try {
      backend_->release(*remote_);
    } catch (const std::bad_alloc&) {  // it ends by itself
    }
  }

  // The engine has taken the lease and releases it from now on. The backend must not be kept alive any more, because
  // its last sinks may own this.
  void handed_over() {
    remote_ = std::nullopt;
    backend_ = nullptr;
  }

 private:
  std::shared_ptr<Backend> backend_;
  std::optional<RemotePrefix> remote_;
};

}  // namespace perigee
