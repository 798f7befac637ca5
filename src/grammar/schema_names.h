// SchemaNames: the part of a schema that a $ref means, by its JSON pointer, $anchor or $id.
//
// References are resolved against the root's $id (RFC 3986, section 5.2). A part with an $id of its own has other
// references, which are not looked at here: SchemaRules refuses them. An $anchor is known within the nearest $id. Parts
// whose URI has over 1,024 bytes have no name.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "base/json.h"

namespace perigee {

class SchemaNames {
 public:
  explicit SchemaNames(const Json& root);  // which outlives it

  const Json* find(std::string_view ref) const;  // nullptr: nothing in the schema has that name

 private:
  void add(const Json& in, const std::string& outside, bool of_names);

  const Json& root_;
  std::string base_;                                    // of the root's references
  std::unordered_map<std::string, const Json*> named_;  // by URI, and by URI#anchor; the first of each
};

// The URI that a reference means where it stands, both without a fragment.
std::string resolved_uri(std::string_view base, std::string_view ref);

}  // namespace perigee
