#include "tensor/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;
constexpr int64_t kSliceBytes = 256 << 10;  // of one thread's turn

int64_t num_parts(int64_t bytes, int64_t part) {
  return (bytes + part - 1) / part;
}

}  // namespace

Upload::Upload(int num_threads) : threads_(num_threads) {
  for (Piece& piece : pieces_) piece.memory = pinned_buffer(kPieceBytes);
}

Upload::~Upload() {
  cuda_ok(cudaDeviceSynchronize(), "waiting for uploads");
}

const void* Upload::bring(const void* from, int64_t bytes, const Stream& consumer) {
  if (from == nullptr || bytes == 0 || !device_status().ok()) return nullptr;
  Slot& slot = next_slot(bytes, consumer);
  if (!device_status().ok()) return nullptr;
  const auto* source = static_cast<const uint8_t*>(from);
  for (int64_t at = 0; at < bytes; at += kPieceBytes)
    send(slot.memory.data() + at, source + at, std::min(kPieceBytes, bytes - at));
  // The stream keeps its order, so the last piece's event stands for all.
  cuda_ok(cudaStreamWaitEvent(consumer.get(), pieces_[piece_].sent.get(), 0), "waiting for an upload");
  return slot.memory.data();
}

// Of the slot that the next call will take, the kernels that read it are queued by now: their end is marked here, early
// enough for that call to wait for nothing newer.
Upload::Slot& Upload::next_slot(int64_t bytes, const Stream& consumer) {
  slots_[(slot_ + 2) % slots_.size()].consumed.record(consumer);
  slot_ = (slot_ + 1) % slots_.size();
  Slot& slot = slots_[slot_];
  if (slot.memory.size() < static_cast<size_t>(bytes)) {
    slot.consumed.wait();
    slot.memory = Buffer();  // first, so that both are never there at once
    slot.memory = device_buffer(static_cast<size_t>(bytes));
  }
  cuda_ok(cudaStreamWaitEvent(stream_.get(), slot.consumed.get(), 0), "waiting for an upload's memory");
  return slot;
}

void Upload::send(uint8_t* to, const uint8_t* from, int64_t bytes) {
  piece_ = (piece_ + 1) % pieces_.size();
  Piece& piece = pieces_[piece_];
  piece.sent.wait();
  if (!device_status().ok()) return;
  threads_.run(num_parts(bytes, kSliceBytes), [&](int64_t slice, int) {
    const int64_t begin = slice * kSliceBytes;
    std::memcpy(piece.memory.data() + begin, from + begin, static_cast<size_t>(std::min(kSliceBytes, bytes - begin)));
  });
  cuda_ok(cudaMemcpyAsync(to, piece.memory.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_.get()),
          "uploading weights");
  piece.sent.record(stream_);
}

}  // namespace perigee
