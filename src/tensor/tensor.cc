#include "tensor/tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

namespace perigee {

int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kI64: return 8;
    case DType::kF8E4M3:
    case DType::kU8:
    case DType::kBool: return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF8E4M3: return "f8_e4m3";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kBool: return "bool";
  }
  return "?";
}

Tensor Tensor::columns(int64_t begin, int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= cols, "columns ", begin, "+", count, " of ", cols);
  Tensor view = *this;
  view.data = static_cast<uint8_t*>(data) + begin * dtype_bytes(dtype);
  view.cols = count;
  return view;
}

Tensor Tensor::row_range(int64_t begin, int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= rows, "rows ", begin, "+", count, " of ", rows);
  Tensor view = *this;
  view.data = static_cast<uint8_t*>(data) + begin * row_stride * dtype_bytes(dtype);
  view.rows = count;
  return view;
}

float f16_to_f32(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

float f8e4m3_to_f32(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
}

uint8_t f32_to_f8e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  if (magnitude < 0x1p-10f) return sign;  // under half of the smallest subnormal (a tie rounds to even: zero)
  int exponent = 0;
  std::frexp(magnitude, &exponent);                        // magnitude = m * 2^exponent, m in [0.5, 1)
  const int step = exponent - 4 < -9 ? -9 : exponent - 4;  // spacing of e4m3 numbers around magnitude is 2^step
  const float units = std::nearbyint(std::ldexp(magnitude, -step));
  const float rounded = std::fmin(std::ldexp(units, step), 448.0f);
  if (rounded < 0x1p-6f) return sign | static_cast<uint8_t>(std::ldexp(rounded, 9));
  std::frexp(rounded, &exponent);
  const int mantissa = static_cast<int>(std::ldexp(rounded, 4 - exponent)) - 8;
  return sign | static_cast<uint8_t>((exponent + 6) << 3 | mantissa);
}

namespace {

constexpr size_t kMinChunkBytes = 4u << 20;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2u << 20;

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

// Large memory straight from the system: a page is zeroed when it is first written, so that a cache of any size costs
// no time at start. The pages before and after it belong to nobody, and to touch them is a fault. The page in front
// says what to give back.
struct Mapping {
  void* begin = nullptr;
  size_t bytes = 0;
};

uint8_t* map_memory(size_t bytes) {
  const size_t usable = round_up(bytes, kPage);
  const size_t all = kPage + kHugePage + usable + kPage;
  void* begin = ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  uint8_t* front = static_cast<uint8_t*>(begin) + kPage;
  const auto at = reinterpret_cast<uintptr_t>(front);
  uint8_t* data = front + (round_up(at, kHugePage) - at);
  if (::mprotect(data - kPage, kPage + usable, PROT_READ | PROT_WRITE) != 0) {
    ::munmap(begin, all);
    return nullptr;
  }
  ::madvise(data, usable, MADV_HUGEPAGE);
  new (data - kPage) Mapping{begin, all};
  return data;
}

void unmap_memory(uint8_t* data) {
  const Mapping mapping = *std::launder(reinterpret_cast<Mapping*>(data - kPage));
  ::munmap(mapping.begin, mapping.bytes);
}

}  // namespace

bool Buffer::can_make(size_t bytes) {
  const size_t with_slack = round_up(bytes, kHugePage) + 2 * kHugePage;
  void* p = ::mmap(nullptr, with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p != MAP_FAILED && ::munmap(p, with_slack) == 0;
}

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes >= kHugePage) {
    data_ = {map_memory(bytes), unmap_memory};
  } else {
    const size_t padded = round_up(std::max<size_t>(bytes, 1), kAlignment);
    data_ = {static_cast<uint8_t*>(std::aligned_alloc(kAlignment, padded)), [](uint8_t* memory) { std::free(memory); }};
    if (data_) std::memset(data_.get(), 0, padded);
  }
  CHECK(data_ != nullptr, "out of host memory allocating ", bytes, " bytes");
}

void Arena::reset() {
  if (separate_) return release({});
  // One chunk as large as all of them together, so that a warm step never crosses chunks.
  if (chunks_.size() > 1) {
    size_t total = 0;
    for (const Buffer& chunk : chunks_) total += chunk.size();
    chunks_.clear();
    chunks_.push_back(source_(total));
    ++num_growths_;
  }
  chunk_ = 0;
  used_ = 0;
}

void Arena::release(Mark mark) {
  if (separate_) chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(mark.chunk), chunks_.end());
  chunk_ = mark.chunk;
  used_ = mark.used;
}

void* Arena::allocate(size_t bytes) {
  if (separate_) {
    ++num_growths_;
    ++chunk_;
    return chunks_.emplace_back(source_(std::max<size_t>(bytes, 1))).data();
  }
  const size_t need = round_up(std::max<size_t>(bytes, 1), kAlignment);
  while (chunk_ < chunks_.size() && used_ + need > chunks_[chunk_].size()) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) {
    chunks_.push_back(source_(std::max(need, kMinChunkBytes)));
    ++num_growths_;
  }
  void* p = chunks_[chunk_].data() + used_;
  used_ += need;
  return p;
}

Tensor Arena::tensor(DType dtype, int64_t rows, int64_t cols) {
  // Rows start on cache lines only when the length allows; kernels do not assume more than element alignment.
  return {.data = allocate(static_cast<size_t>(rows * cols * dtype_bytes(dtype))),
          .dtype = dtype,
          .rows = rows,
          .cols = cols,
          .row_stride = cols};
}

}  // namespace perigee
