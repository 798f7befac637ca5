#include "base/model_folder.h"

#include <fmt/core.h>

#include <filesystem>

namespace perigee {
namespace fs = std::filesystem;

namespace {

// Of a snapshot in the cache of Hugging Face, .../models--X/snapshots/REVISION, the files are links to
// .../models--X/blobs.
bool may_hold_files_of(const fs::path& folder, const fs::path& holder) {
  const fs::path snapshots = folder.parent_path();
  return holder == folder || (snapshots.filename() == "snapshots" && holder == snapshots.parent_path() / "blobs");
}

}  // namespace

Result<std::string> resolve_in_folder(const std::string& folder, const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 255 && name.find('/') == std::string::npos &&
                     name.find('\0') == std::string::npos && name != "." && name != "..";
  if (!plain) {
    std::string shown = name.substr(0, 100);
    for (char& c : shown)
      if (static_cast<unsigned char>(c) < 0x20) c = '?';
    return bad_input(
        fmt::format("{}: file name \"{}\" must be a name inside the folder, without a path", folder, shown));
  }
  std::error_code error;
  const fs::path inside = fs::canonical(folder, error);
  if (error) return Error(Code::kNotFound, fmt::format("{}: {}", folder, error.message()));
  const fs::path path = fs::canonical(inside / name, error);
  if (error) return Error(Code::kNotFound, fmt::format("{}/{}: {}", folder, name, error.message()));
  if (!may_hold_files_of(inside, path.parent_path()))
    return bad_input(fmt::format(
        "{}/{}: the link leaves the model folder; hard links of all files, without a copy: cp -rlL {} NEW_FOLDER",
        folder, name, folder));
  if (!fs::is_regular_file(path, error)) return bad_input(fmt::format("{}/{}: is not a regular file", folder, name));
  return path.string();
}

Result<std::string> read_in_folder(const std::string& folder, const std::string& name, size_t max_bytes) {
  ASSIGN_OR_RETURN(const std::string path, resolve_in_folder(folder, name));
  return read_file(path, max_bytes);
}

bool folder_has(const std::string& folder, const std::string& name) {
  std::error_code error;
  return fs::exists(fs::symlink_status(fs::path(folder) / name, error));
}

}  // namespace perigee
