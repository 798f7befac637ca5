// The folder of a checkpoint: which files in it may be opened. Names come from untrusted files (SEC-13).
#pragma once

#include <string>

#include "base/file.h"
#include "base/result.h"

namespace perigee {

// The real path of regular file `name` in `folder`. `name` must be a plain file name and must not be a symbolic link
// that leaves the folder, but for links of a snapshot in the cache of Hugging Face to the blobs beside it. Errors name
// folder and file.
Result<std::string> resolve_in_folder(const std::string& folder, const std::string& name);

}  // namespace perigee
