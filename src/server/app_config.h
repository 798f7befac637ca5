// AppConfig: what the API needs to know before it answers.
#pragma once

#include <string>
#include <vector>

#include "server/request_fields.h"

namespace perigee {

struct AppConfig {
  std::vector<std::string> served_names;  // the first is the default; a server takes none for model_path
  std::string model_path;
  std::vector<std::string> api_keys;     // empty: everything is open
  bool metrics_open = true;              // GET /metrics needs no key
  bool ignore_priority = false;          // of requests: all have the same
  std::string reasoning_field = "both";  // "both", "reasoning" or "reasoning_content"
  bool kimi_strict = false;              // see RequestContext
  double stall_s = 60;                   // work in flight and no step for longer: /livez says 503
  RequestCaps caps;
};

}  // namespace perigee
