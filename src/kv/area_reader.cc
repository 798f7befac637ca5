#include "kv/area_reader.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "kv/peer.h"

namespace perigee {
namespace {

constexpr size_t kHandleBytes = 64;
constexpr size_t kMaxStagedBytes = 64 + kMaxSlotUnits * (sizeof(uint64_t) + sizeof(uint8_t));

// One pull: pieces of the range in turn, each in slot (its number) % kAreaSlots.
class Pull {
 public:
  struct Piece {
    UnitRange units;
    StagedUnits staged;
    bool begun = false;
  };

  Pull(const PageStore& store, const UnitPages& to, const Areas& areas, UnitRange units)
      : store_(store), to_(to), areas_(areas) {
    const auto most =
        static_cast<int32_t>(std::min<int64_t>(kAreaSlotBytes / store.unit_bytes(units.group), int64_t{kMaxSlotUnits}));
    for (int32_t done = 0; done < units.count; done += most)
      pieces_.push_back({.units = {units.group, units.first + done, std::min(most, units.count - done)}});
  }
  ~Pull() {  // after an error: the copies write pages
    for (size_t i = 0; i < pieces_.size(); ++i)
      if (pieces_[i].begun)
        for (const auto& area : areas_) (void)area->wait(slot(i), {});
  }
  Pull(const Pull&) = delete;
  Pull& operator=(const Pull&) = delete;

  size_t size() const { return pieces_.size(); }
  const UnitRange& units(size_t i) const { return pieces_[i].units; }
  static int32_t slot(size_t i) { return static_cast<int32_t>(i % kAreaSlots); }

  Status begin(size_t i, StagedUnits staged, size_t num_areas) {
    Piece& piece = pieces_[i];
    const auto count = static_cast<size_t>(piece.units.count);
    if (staged.digests.size() != count || staged.ranks.size() != count)
      return bad_input("a reply of another number of units", "digests");
    if (std::any_of(staged.ranks.begin(), staged.ranks.end(), [&](uint8_t rank) { return rank >= num_areas; }))
      return bad_input("units of a rank that shows no memory", "ranks");
    piece.staged = std::move(staged);
    piece.begun = true;
    store_.begin_take(to_, piece.units, areas_, slot(i), piece.staged);
    return {};
  }
  Status end(size_t i) {
    Piece& piece = pieces_[i];
    Status status = store_.end_take(to_, piece.units, areas_, slot(i), piece.staged);
    piece.begun = false;
    return status;
  }

 private:
  const PageStore& store_;
  const UnitPages& to_;
  const Areas& areas_;
  std::vector<Piece> pieces_;
};

}  // namespace

std::vector<uint8_t> host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");  // its size says nothing
  std::string id;
  std::getline(file, id);
  return {id.begin(), id.end()};
}

bool is_this_host(std::span<const uint8_t> asking_host) {
  const std::vector<uint8_t> here = host_id();
  return !here.empty() && std::equal(here.begin(), here.end(), asking_host.begin(), asking_host.end());
}

std::vector<uint8_t> show_areas(const Areas& areas) {
  std::vector<uint8_t> shown;
  for (const auto& area : areas) {
    std::string handle = area->handle();
    handle.resize(kHandleBytes);
    shown.insert(shown.end(), handle.begin(), handle.end());
  }
  return shown;
}

Result<std::unique_ptr<AreaReader>> AreaReader::map(const PageStore& store, std::span<const uint8_t> shown) {
  if (shown.empty() || shown.size() % kHandleBytes != 0) return bad_input("handles of another size", "blob");
  std::vector<std::string> handles;
  for (; !shown.empty(); shown = shown.subspan(kHandleBytes))
    handles.emplace_back(shown.begin(), shown.begin() + kHandleBytes);
  ASSIGN_OR_RETURN(Areas areas, store.map_areas(handles));
  return std::unique_ptr<AreaReader>(new AreaReader(std::move(areas), handles.size()));
}

Status AreaReader::pull(const FramedSocket& frames, uint32_t& number, double silence_s, const LeaseName& lease,
                        UnitRange units, const PageStore& store, const UnitPages& to,
                        const std::stop_token& dropped) const {
  Pull pull(store, to, areas_, units);
  const uint32_t first = number + 1;
  const auto ask = [&](size_t i) -> Status {
    if (i >= pull.size()) return {};
    return frames.send(StageUnits{lease, pull.units(i), Pull::slot(i)}, ++number);
  };
  for (size_t i = 0; i < kAreaSlots; ++i) RETURN_IF_ERROR(ask(i));
  for (size_t i = 0; i < pull.size(); ++i) {
    if (dropped.stop_requested()) return dropped_import();
    ASSIGN_OR_RETURN(const FramedSocket::Frame frame, frames.receive_frame(kMaxStagedBytes, silence_s));
    if (frame.header.number != first + i) return bad_input("the reply to another request", "number");
    ASSIGN_OR_RETURN(WireMessage reply, decode_payload(frame.header.type, frame.payload));
    if (const auto* refused = std::get_if<Refused>(&reply)) return Error(refused->code, refused->why);
    auto* staged = std::get_if<Staged>(&reply);
    if (staged == nullptr) return bad_input("a reply out of turn", "type");
    RETURN_IF_ERROR(pull.begin(i, std::move(*staged), num_areas_));
    if (i == 0) continue;
    RETURN_IF_ERROR(pull.end(i - 1));
    RETURN_IF_ERROR(ask(i - 1 + kAreaSlots));
  }
  return pull.size() == 0 ? Status() : pull.end(pull.size() - 1);
}

}  // namespace perigee
