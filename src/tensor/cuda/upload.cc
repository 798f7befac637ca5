#include "tensor/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;
constexpr int64_t kSliceBytes = 256 << 10;  // of one thread's turn

}  // namespace

Upload::Upload(int num_threads) : threads_(num_threads) {
  for (Piece& piece : pieces_) piece.memory = pinned_buffer(kPieceBytes);
}

Upload::~Upload() {
  cuda_ok(cudaDeviceSynchronize(), "waiting for uploads");
}

const void* Upload::bring(const ByteRows& from, const Stream& consumer) {
  if (from.data == nullptr || from.bytes() == 0 || !device_status().ok()) return nullptr;
  Slot& slot = next_slot(from.extent(), consumer);
  if (!device_status().ok()) return nullptr;
  const ByteRows all = from.joined();
  CHECK(all.rows == 1 || all.row_bytes <= kPieceBytes, "rows of ", all.row_bytes, " bytes");
  for (int64_t i = 0; i < all.num_pieces(kPieceBytes); ++i) {
    const ByteRows piece = all.piece(kPieceBytes, i);
    send(slot.memory.data() + (piece.row(0) - all.row(0)), piece);
  }
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

void Upload::send(uint8_t* to, const ByteRows& from) {
  piece_ = (piece_ + 1) % pieces_.size();
  Piece& piece = pieces_[piece_];
  piece.sent.wait();
  if (!device_status().ok()) return;
  threads_.run(from.num_pieces(kSliceBytes), [&](int64_t i, int) {
    const ByteRows slice = from.piece(kSliceBytes, i);
    slice.copy_to(piece.memory.data() + i * from.piece_bytes(kSliceBytes), slice.row_bytes);
  });
  const auto bytes = static_cast<size_t>(from.bytes()), row_bytes = static_cast<size_t>(from.row_bytes);
  if (from.rows == 1)
    cuda_ok(cudaMemcpyAsync(to, piece.memory.data(), bytes, cudaMemcpyHostToDevice, stream_.get()),
            "uploading weights");
  else
    cuda_ok(cudaMemcpy2DAsync(to, static_cast<size_t>(from.stride), piece.memory.data(), row_bytes, row_bytes,
                              static_cast<size_t>(from.rows), cudaMemcpyHostToDevice, stream_.get()),
            "uploading weights");
  piece.sent.record(stream_);
}

}  // namespace perigee
