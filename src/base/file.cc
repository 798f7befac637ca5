#include "base/file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

namespace perigee {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

Error file_error(const std::string& path, const char* doing) {
  const Code code = errno == ENOENT ? Code::kNotFound : Code::kBadInput;
  return Error(code, fmt::format("{}: cannot {}: {}", path, doing, std::strerror(errno)));
}

Result<size_t> regular_size(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return file_error(path, "stat");
  if (!S_ISREG(info.st_mode)) return bad_input(fmt::format("{}: is not a regular file", path));
  return static_cast<size_t>(info.st_size);
}

// What `git clone` leaves in place of a file when Git LFS is not installed.
Status refuse_lfs_pointer(const std::string& path, std::string_view text) {
  if (!text.starts_with("version https://git-lfs")) return {};
  return bad_input(path + ": is a Git LFS pointer, not the file itself: run git lfs pull in its folder");
}

}  // namespace

Result<std::string> read_file(const std::string& path, size_t max_bytes) {
  // O_NONBLOCK: opening a FIFO must not hang before the check that refuses it.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return file_error(path, "open");
  ASSIGN_OR_RETURN(const size_t size, regular_size(fd.get(), path));
  if (size > max_bytes)
    return Error(Code::kTooLarge, fmt::format("{}: {} bytes is over the limit of {}", path, size, max_bytes));
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd.get(), text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return file_error(path, "read");
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  RETURN_IF_ERROR(refuse_lfs_pointer(path, text));
  return text;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return file_error(path, "open");
  ASSIGN_OR_RETURN(const size_t size, regular_size(fd.get(), path));
  if (size == 0) return MappedFile(nullptr, 0);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) return file_error(path, "map");
  MappedFile file(static_cast<const uint8_t*>(data), size);
  RETURN_IF_ERROR(refuse_lfs_pointer(path, std::string_view(static_cast<const char*>(data), size)));
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace perigee
