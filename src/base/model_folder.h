// The model folder: which files in it may be opened. Every reader of a model's files goes through here, because names
// and links come from whoever made the model.
#pragma once

#include <string>

#include "base/file.h"
#include "base/result.h"

namespace perigee {

// The real path of regular file `name` in `folder`. `name` must be a plain file name. Symbolic links, also those that
// lead over other links, must end in the folder itself; in a snapshot of the Hugging Face cache they may end in the
// blobs of the same model. Errors name folder and file.
Result<std::string> resolve_in_folder(const std::string& folder, const std::string& name);

// read_file() of such a file.
Result<std::string> read_in_folder(const std::string& folder, const std::string& name, size_t max_bytes);

// Whether the folder has an entry of that name. True for a link that leads nowhere or out of the folder: reading it is
// an error, while leaving it out would serve the model without a file that its maker meant to be there.
bool folder_has(const std::string& folder, const std::string& name);

}  // namespace perigee
