#include "model/model_folder.h"

#include <filesystem>

namespace perigee {
namespace fs = std::filesystem;

Result<std::string> resolve_in_folder(const std::string& folder, const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 255 && name.find('/') == std::string::npos &&
                     name.find('\0') == std::string::npos && name != "." && name != "..";
  if (!plain) {
    std::string shown = name.substr(0, 100);
    for (char& c : shown)
      if (static_cast<unsigned char>(c) < 0x20) c = '?';
    return bad_input(str_cat(folder, ": file name \"", shown, "\" is no plain name inside the folder"));
  }
  std::error_code error;
  const fs::path inside = fs::canonical(folder, error);
  if (error) return Error(Code::kNotFound, str_cat(folder, ": ", error.message()));
  const fs::path path = fs::canonical(inside / name, error);
  if (error) return Error(Code::kNotFound, str_cat(folder, "/", name, ": ", error.message()));
  if (path.parent_path() != inside)
    return bad_input(str_cat(folder, "/", name,
                             ": the link leaves the model folder; hard links of all files, without a copy: cp -rlL ",
                             folder, " NEW_FOLDER"));
  if (!fs::is_regular_file(path, error)) return bad_input(str_cat(folder, "/", name, ": is no regular file"));
  return path.string();
}

}  // namespace perigee
