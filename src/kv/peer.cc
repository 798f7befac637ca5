#include "kv/peer.h"

namespace perigee {
namespace {

class InProcess final : public Peer {
 public:
  explicit InProcess(LeaseTable& table) : table_(table) {}
  Result<LeaseHold> open(const LeaseName& lease, std::span<const int32_t> tokens, int32_t num_blocks) override {
    return table_.open(lease, tokens, num_blocks);
  }
  Status read(const LeaseName& lease, UnitRange units, std::span<uint8_t> out) override {
    return table_.read(lease, units, out);
  }
  Result<LeaseHold> extend(const LeaseName& lease) override { return table_.extend(lease); }
  Result<uint64_t> await_growth(uint64_t known, double wait_s) override { return table_.await_growth(known, wait_s); }
  Status release(const LeaseName& lease) override {
    table_.release(lease);
    return {};
  }

 private:
  LeaseTable& table_;
};

}  // namespace

Error dropped_import() {
  return Error(Code::kCancelled, "its request has ended");
}

Status Peer::pull(const LeaseName& lease, UnitRange units, const PageStore& store, const UnitPages& to,
                  const std::stop_token& /*dropped*/) {
  staging_.resize(static_cast<size_t>(units.count * store.unit_bytes(units.group)));
  RETURN_IF_ERROR(read(lease, units, staging_));
  return store.scatter(to, units, staging_);
}

Connect connect_in_process(LeaseTable& table) {
  return [&table](const std::string&, const CacheShape& here, const std::stop_token&) -> Result<std::unique_ptr<Peer>> {
    RETURN_IF_ERROR(check_same(here, table.shape()));
    return std::unique_ptr<Peer>(std::make_unique<InProcess>(table));
  };
}

}  // namespace perigee
