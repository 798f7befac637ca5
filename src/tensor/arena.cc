#include "tensor/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace perigee {
namespace {

constexpr size_t kMinChunkBytes = 4u << 20;
constexpr size_t kHugePage = 2u << 20;

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

bool Buffer::can_make(size_t bytes) {
  const size_t with_slack = round_up(bytes, kHugePage) + 2 * kHugePage;
  void* p = ::mmap(nullptr, with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p != MAP_FAILED && ::munmap(p, with_slack) == 0;
}

Buffer::Buffer(size_t bytes) : size_(bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const size_t padded = round_up(std::max<size_t>(bytes, 1), alignment);
  void* p = std::aligned_alloc(alignment, padded);
  CHECK(p != nullptr, "out of host memory allocating ", bytes, " bytes");
  if (alignment == kHugePage) ::madvise(p, padded, MADV_HUGEPAGE);
  std::memset(p, 0, padded);
  data_ = {static_cast<uint8_t*>(p), [](uint8_t* memory) { std::free(memory); }};
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
