// Test only: what a FakeBackend does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "control/handover.h"

namespace perigee {

struct FakeOptions {
  // The ids that a prompt is answered with; after them, stop id `eos` if it is among the request's.
  std::function<std::vector<int32_t>(const std::vector<int32_t>& prompt)> reply;
  int32_t eos = 258;  // <|im_end|> of test_tokenizer()
  int32_t vocab = 512;
  int64_t max_model_len = 256;
  int64_t max_choices = 1024;
  int32_t num_drafts = 0;
  bool takes_leases = false;
  double tick_s = 0;  // between tokens
  int32_t tokens_per_chunk = 1;
  int32_t hold_after = INT32_MAX;  // a choice with so many tokens has no more until release() or a cancel
  int32_t fail_after = -1;         // every choice ends with kError after that many tokens
  size_t accepts = SIZE_MAX;       // requests; later ones find the queue full
};

inline RemotePrefix fake_lease() {
  return {.peer = "10.0.0.1:5600", .lease = {7, 3}, .num_blocks = 2, .tag = std::string(64, 'a')};
}

}  // namespace perigee
