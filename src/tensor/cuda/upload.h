// Upload: bytes of mapped files to the GPU as fast as they can be read. Threads copy a piece into pinned memory, which
// is what reads the file; meanwhile the pieces before it travel, and kernels repack what has arrived.
//
// Only for code that includes CUDA headers anyway.
#pragma once

#include <array>

#include "base/thread_pool.h"
#include "tensor/byte_rows.h"
#include "tensor/cuda/check.h"
#include "tensor/tensor.h"

namespace perigee {

class Upload {
 public:
  explicit Upload(int num_threads);
  ~Upload();  // waits for the device: what was brought may still be on its way, or be read
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Copies of the bytes in device memory, 256-byte aligned, for kernels that are queued on `consumer` before the call
  // after the next one. Returns once `from` is read. Null: nothing to bring, or the device failed.
  // The copies of rows are as far apart as the rows; what lies between is neither read nor written.
  const void* bring(const ByteRows& from, const Stream& consumer);

  static constexpr int kSlots = 4;

 private:
  struct Slot {
    Buffer memory;
    Event consumed;  // the kernels that read it are done
  };
  struct Piece {
    Buffer memory;  // pinned
    Event sent;
  };

  Slot& next_slot(int64_t bytes, const Stream& consumer);
  void send(uint8_t* to, const ByteRows& from);

  ThreadPool threads_;
  Stream stream_;
  std::array<Slot, kSlots> slots_;
  std::array<Piece, 4> pieces_;
  size_t slot_ = 0, piece_ = 0;
};

}  // namespace perigee
