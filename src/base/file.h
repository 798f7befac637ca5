// Files: read whole small ones under a cap, map big ones. A pointer of Git LFS in place of a file is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"

namespace perigee {

// Reads a regular file of at most `max_bytes`. Errors name the path.
Result<std::string> read_file(const std::string& path, size_t max_bytes);

// A read-only memory map of a regular file, unmapped when it goes.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  MappedFile(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace perigee
