// Tensor: a view of numbers somewhere in memory (dtype, shape, pointer). It owns nothing.
// Buffer: aligned memory that lives as long as its owner, of the host unless it was made for a device.
// Arena: per-step memory, reset at the start of each step. Grows while warming up, never after.
//
// The last dimension is contiguous; rows may be further apart than their length (row_stride), so that a column range
// of a matrix is a view too.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"

namespace perigee {

enum class DType : uint8_t { kF32, kBF16, kF16, kF8E4M3, kI32, kI64, kU8, kBool };

int64_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements, >= cols

  template <typename T>
  constexpr T* row(int64_t r) const {  // constexpr: for device code too
    return static_cast<T*>(data) + r * row_stride;
  }
  // Columns [begin, begin + count) of every row.
  Tensor columns(int64_t begin, int64_t count) const;
  // Rows [begin, begin + count).
  Tensor row_range(int64_t begin, int64_t count) const;
  bool contiguous() const { return row_stride == cols; }
};

inline float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return __builtin_bit_cast(float, wide);
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t bits);
float f8e4m3_to_f32(uint8_t bits);
uint8_t f32_to_f8e4m3(float value);  // nearest even, saturating at 448; NaN stays NaN

inline constexpr size_t kAlignment = 64;  // a cache line, an AMX tile row

class Buffer {
 public:
  Buffer() = default;
  // Where bytes may be too many, ask can_make() first: not to get them is a failed check.
  explicit Buffer(size_t bytes);  // zeroed, kAlignment-aligned; huge pages where the system offers them
  // Memory made elsewhere, given back by `release`.
  Buffer(uint8_t* data, size_t bytes, void (*release)(uint8_t*)) : data_(data, release), size_(bytes) {}
  // Whether the system has address space and commitment for so many more bytes now; nothing is kept. A container's
  // limit is met later, when they are written.
  static bool can_make(size_t bytes);
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[], void (*)(uint8_t*)> data_{nullptr, nullptr};
  size_t size_ = 0;
};

class Arena {
 public:
  using Source = Buffer (*)(size_t bytes);
  // `source` makes the memory, on the host unless told otherwise.
  // `separate`: each piece of memory is made and given back by itself and ends where it was asked to end, so that a
  // memory checker sees reads beyond it, and reads of what nobody wrote; slow.
  explicit Arena(
      Source source = [](size_t bytes) { return Buffer(bytes); }, bool separate = false)
      : source_(source), separate_(separate) {}
  // Everything handed out before becomes invalid; no memory is returned to the system.
  void reset();
  Tensor tensor(DType dtype, int64_t rows, int64_t cols);  // uninitialised, contiguous
  template <typename T>
  std::span<T> array(int64_t count) {
    return {static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T))), static_cast<size_t>(count)};
  }
  void* allocate(size_t bytes);
  // Everything handed out after mark() becomes invalid at release(): a layer's temporaries, between layers.
  struct Mark {
    size_t chunk = 0, used = 0;
  };
  Mark mark() const { return {chunk_, used_}; }
  void release(Mark mark);
  int64_t num_growths() const { return num_growths_; }  // system allocations so far: constant after warm-up

 private:
  Source source_;
  bool separate_;
  std::vector<Buffer> chunks_;
  size_t chunk_ = 0;
  size_t used_ = 0;
  int64_t num_growths_ = 0;
};

// Gives back what was taken from the arena during its life.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  const Arena::Mark mark_;
};

}  // namespace perigee
